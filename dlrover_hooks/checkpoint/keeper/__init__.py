"""The keeper: one process per node that owns checkpoint memory, hashes it and writes it to storage. No torch.

Start here: `python -m dlrover_hooks.checkpoint.keeper`, then `daemon.Keeper`.
"""
