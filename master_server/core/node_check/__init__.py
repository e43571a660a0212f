"""The check of a job's nodes: pairs them for transfers, round by round, and singles out the bad and the slow ones.

It measures nothing itself. The way in: `check_requests`.
"""
