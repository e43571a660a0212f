"""Inside a training process, below the session: startup, joining rounds, preemption, reports to the master.

It is independent of frameworks. Entry point: `dlrover_hooks.session.Session`, which is composed of these parts.
"""
