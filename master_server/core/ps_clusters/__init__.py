"""Parameter server jobs: the tasks, what becomes of each, and the versions of the cluster that the chief switches to.

Entry point: `task_requests`.
"""
