"""Data that the master lends in shards, for asynchronous or uneven work.

The way in: `dataset.ShardDataset`; `loader.elastic_loader` makes a `LeasedLoader` of a loader over it.
"""
