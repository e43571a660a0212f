"""A lone image: what is the same on all ranks, saved as that of a world of one, so that every rank can go on with it.

It is made when a round breaks, by each survivor, of its last quiet point. No vote is needed: one of them is enough.
"""

from __future__ import annotations

import threading

from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed, Notice
from dlrover_hooks.protocol import Generation

WHOSE = (0, 1)
"""Its rank and world size."""


class Lone:
    """Waits for the hash of a lone image. `want` and `wait` on the training thread, `takes` on any."""

    def __init__(self) -> None:
        self._wanted: Generation | None = None
        self._hashed = threading.Event()

    def want(self, generation: Generation) -> None:
        """It is about to be saved."""
        self._hashed.clear()
        self._wanted = generation

    def takes(self, notice: Notice) -> bool:
        """Is `notice` the hash that is waited for? Nobody else is to hear of it."""
        if not isinstance(notice, Hashed) or notice.generation != self._wanted:
            return False
        mine = (notice.rank, notice.world_size) == WHOSE
        if mine:
            self._hashed.set()
        return mine

    def wait(self, within_s: float) -> bool:
        """True once the keeper has hashed it."""
        return self._hashed.wait(within_s)
