"""The Brain: a service that keeps the statistics of all jobs in a database and plans their resources from it.

Its processes have no state: several serve one database. Needs the extra `brain`; `client`, for a master, does not.
Entry point: `python -m dlrover_hooks.master.brain`; for a master `client.brain_optimizer`.
"""
