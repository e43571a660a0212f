"""Processes that the launcher starts: workers, master, keeper; their output and their last errors.

It decides nothing. The way in: `workers.Workers` and `services.Services`.
"""
