"""Determines which samples a rank trains on: order, batches and position of a run, without a master.

Entry point: `loader.elastic_loader`.
"""
