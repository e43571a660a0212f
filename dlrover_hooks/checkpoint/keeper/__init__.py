"""The keeper: the process of a node that owns checkpoint memory, hashes it and makes it durable. No torch.

The way in: `python -m dlrover_hooks.checkpoint.keeper`, then `daemon.Service`.
"""
