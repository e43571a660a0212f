"""The master: messages in, pure machines, journal, effects out. It imports nothing of the training side but storage.

The way in: `python -m dlrover_hooks.master`.
"""
