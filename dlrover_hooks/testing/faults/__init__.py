"""Faults for real processes: a plan of them, the way they are done, and a worker's part in it.

The way in: `fault_plan` and `drill`.
"""
