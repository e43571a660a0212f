"""Datasets that the master lends in shards: what is to do, lent and done.

The way in: `job_ledgers`.
"""
