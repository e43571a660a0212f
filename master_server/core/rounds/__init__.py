"""Membership of one job: joins and departures, the forming of rounds, and the assignment of ranks.

Entry points: `rendezvous` and `member_changes`.
"""
