"""Membership of one job: who joins and leaves, when a round forms, which rank each member gets.

The way in: `rendezvous` and `member_changes`.
"""
