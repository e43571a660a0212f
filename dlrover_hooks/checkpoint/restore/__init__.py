"""Reads generations back from memory or storage and verifies every chunk. It writes nothing.

Entry point: `generation_loader`.
"""
