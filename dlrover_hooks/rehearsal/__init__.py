"""Runs a user's unchanged script with and without faults, and compares the runs.

Entry point: `dlrover-hooks rehearse`.
"""
