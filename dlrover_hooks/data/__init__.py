"""Which samples a rank trains on: order, batches and the place of a run in them, without a master.

The way in: `loader.elastic_loader`.
"""
