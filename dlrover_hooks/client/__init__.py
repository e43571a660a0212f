"""The way to the master: over HTTP, by the liveness connection, or to its core in this process.

It knows messages only, neither data nor checkpoints. The way in: `client.MasterClient`.
"""

from __future__ import annotations

from dlrover_hooks.client.http_client import (
    Caller as Caller,
)
from dlrover_hooks.client.http_client import (
    MasterClient as MasterClient,
)
