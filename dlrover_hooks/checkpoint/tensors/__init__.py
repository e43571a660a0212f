"""Copies tensors into slots and out of them: backends for NumPy and torch, and the index over all ranks' files.

Start here: `numpy_backend.library` picks the backend, `generation_images.Images` reads.
"""
