"""Connections to the master: HTTP calls, the liveness connection, and the master's core run in this process.

This package handles messages only, neither data nor checkpoints. Entry point: `MasterClient`.
"""

from __future__ import annotations

from dlrover_hooks.client.http_client import (
    Caller as Caller,
    MasterClient as MasterClient,
)
