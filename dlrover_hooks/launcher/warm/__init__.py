"""Warm standbys: processes that have imported everything and wait for a rank.

Entry points: `standby_pool` for the launcher, `bootstrap` and `fork_server` in the processes themselves.
"""
