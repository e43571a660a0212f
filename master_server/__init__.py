"""The HTTP master: pure state machines (`core`) process requests, a journal stores them, then their effects are run.

It imports nothing of the training side but checkpoint storage. Entry point: `python -m dlrover_hooks.master`.
"""
