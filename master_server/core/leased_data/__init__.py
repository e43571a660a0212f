"""Datasets that the master leases to workers in shards: which positions are to do, leased and done.

Entry point: `job_ledgers`.
"""
