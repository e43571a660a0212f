"""Adapters: one module or package for each framework; each only turns its events into a session's verbs.

Importing an adapter is the opt-in to its framework.
"""
