"""The master's pure state machines: (state, event, now) -> effects. No clock, randomness, I/O or threads.

Entry point: `job_registry.apply` on a `job_registry.Master`.
"""
