"""Shared memory of a node: segments, their slots, copies without the GIL, checksums. No storage, no torch.

Start here: `segment.SharedSegment`.
"""
