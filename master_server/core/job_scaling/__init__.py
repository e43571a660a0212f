"""The plans of a job that is scaled, what became of them, and the nodes that it is to have.

Entry point: `plan_verification` until the master makes plans itself.
"""
