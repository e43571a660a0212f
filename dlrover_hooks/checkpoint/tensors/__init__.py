"""Tensors into slots and out of them: NumPy's and torch's, and the index over all ranks' files.

The way in: `numpy_backend.library` picks the backend, `shard_index.Images` reads.
"""
