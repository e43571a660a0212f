"""Data that the master lends out in shards, for asynchronous or uneven work.

Entry point: `dataset.ShardDataset`; `loader.elastic_loader` makes a `LeasedLoader` of a loader over it.
"""
