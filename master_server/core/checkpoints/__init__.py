"""Checkpoint generations in the master: votes of the ranks, commits, and the choice of the generation to restore.

Entry points: `votes` and `restore_choice`.
"""
