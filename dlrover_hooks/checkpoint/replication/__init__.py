"""Replicas of images on other nodes, sent from keeper to keeper over TCP. No torch.

Start here: `controller.ReplicationController`.
"""
