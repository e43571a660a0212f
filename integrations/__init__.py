"""Adapters: one module or package per framework, each only translates its events into calls of `Session`.

Importing an adapter is the opt-in to its framework.
"""
