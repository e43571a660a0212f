"""Data that the master lends out in shards, for asynchronous or uneven work.

Entry point: `shard_dataset.ShardDataset`. `dlrover_hooks.data.loader.elastic_loader` makes a `LeasedLoader` of a loader
over it.
"""
