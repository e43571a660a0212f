"""Checks this node: measures it, transfers data to other nodes that are checked, and gets the master's verdict.

It decides nothing itself: the verdicts are the master's. The way in: `local_check.measure_node`, `participation`.
"""
