"""The connection between a trainer and its node's keeper: messages, unix socket, both ends. No torch.

The way in: `keeper_client.Line` for the trainer, `server_loop.Loop` for the keeper.
"""
