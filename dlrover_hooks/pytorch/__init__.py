"""Shared parts for any torch training: loop driver, state dicts, weighted gradients, checkpoint readers and writers.

Independent of any framework above torch. Entry point: `async_checkpointer.AsyncCheckpointer`.
"""
