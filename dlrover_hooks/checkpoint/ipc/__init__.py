"""The connection between a trainer and its node's keeper: messages, unix socket, both ends. No torch.

Start here: `keeper_client.KeeperClient` for the trainer, `server_loop.ServerLoop` for the keeper.
"""
