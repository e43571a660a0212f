"""Generations as the master sees them: votes of the ranks, commits, and the choice of what is restored.

The way in: `votes` and `restore_choice`.
"""
