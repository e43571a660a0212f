"""Copies of images on other nodes, from keeper to keeper over TCP. No torch.

The way in: `controller.Replication`.
"""
