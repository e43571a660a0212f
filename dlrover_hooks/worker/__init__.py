"""Inside a training process, below the session: start-up, joining rounds, preemption, reports to the master.

It knows no framework. The way in: `dlrover_hooks.session.Session`, which is made of these parts.
"""
