"""Faults for real processes: the plan, the actions, and their injection into a worker.

Entry points: `fault_plan` and `drill`.
"""
