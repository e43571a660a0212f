"""Random states of a process (Python, NumPy, torch): captured, restored, and recorded for each step.

It imports no framework by itself. Entry point: `from dlrover_hooks import rng`.
"""

from __future__ import annotations

from dlrover_hooks.rng.process_state import (
    Packed as Packed,
    Taken as Taken,
    capture as capture,
    check as check,
    pack as pack,
    reseed as reseed,
    restore as restore,
    take as take,
    unpack as unpack,
)
