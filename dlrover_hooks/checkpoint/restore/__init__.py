"""Generations read again, from memory or storage, every chunk verified. It writes nothing.

The way in: `generation_loader`.
"""
