"""The master's pure machines: (state, event, now) -> effects. No clock, randomness, I/O or threads.

The way in: `job_registry.Jobs`.
"""
