"""Processes that the launcher starts: workers, master, keeper; their output and their final errors.

This package takes no decisions. Entry points: `workers.Workers` and `services.Services`.
"""
