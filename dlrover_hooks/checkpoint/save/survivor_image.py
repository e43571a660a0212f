"""A single-rank image: the state that is the same on all ranks, saved as that of a world of one.

Every rank can continue from it. When a round breaks, each survivor makes one of its last step boundary. It needs no
votes: one such image is enough.
"""

from __future__ import annotations

import threading

from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed, Notice
from dlrover_hooks.protocol import Generation

WHOSE = (0, 1)
"""Its rank and world size."""


class Lone:
    """Waits for the hash of a single-rank image. `want` and `wait` on the training thread, `takes` on any."""

    def __init__(self) -> None:
        self._wanted: Generation | None = None
        self._hashed = threading.Event()

    def want(self, generation: Generation) -> None:
        """`generation` is about to be saved."""
        self._hashed.clear()
        self._wanted = generation

    def takes(self, notice: Notice) -> bool:
        """Whether `notice` is the awaited hash. It is then not passed on."""
        if not isinstance(notice, Hashed) or notice.generation != self._wanted:
            return False
        mine = (notice.rank, notice.world_size) == WHOSE
        if mine:
            self._hashed.set()
        return mine

    def wait(self, within_s: float) -> bool:
        """True once the keeper has hashed the image."""
        return self._hashed.wait(within_s)
