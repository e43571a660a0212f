"""Judges how workers end: the table of causes, the verdict on a failure, the budget of restarts, the last screen.

It starts nothing. Entry point: `restart_budget.Budget`.
"""
