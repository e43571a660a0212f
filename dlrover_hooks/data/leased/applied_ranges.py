"""Which leased batches are in the model: received, marked, committed. Pure; training thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from dlrover_hooks.data.leased.lease_client import HeldLease
from dlrover_hooks.protocol.ranges import Ranges


class LeasePart(msgspec.Struct, frozen=True, gc=False):
    """Positions [lo, hi) of a lease."""

    held: HeldLease
    lo: int
    hi: int


class AppliedRanges:
    """Parts in the order in which the loop received them, and those that are committed since the attempt began."""

    def __init__(self) -> None:
        self.marks = 0
        """How often the optimizer stepped."""
        self._pieces: deque[LeasePart] = deque()
        self._marked = 0
        self._done: dict[str, Ranges] = {}
        self._run: tuple[HeldLease, int] | None = None
        """A lease, and the start of its committed part that is not in `_done` yet: its batches only move `_run_hi`."""
        self._run_hi = 0

    @property
    def done(self) -> dict[str, Ranges]:
        """Committed since the attempt began, by partition."""
        self._end_run()
        return self._done

    def _end_run(self) -> None:
        if self._run is not None:
            (held, lo), self._run = self._run, None
            self._done.setdefault(held.partition, Ranges()).add(lo, self._run_hi)

    def received(self, piece: LeasePart) -> None:
        """The loop received `piece`."""
        self._pieces.append(piece)

    def mark(self) -> None:
        """The optimizer stepped: the batches received so far are in the model once the step is entirely over."""
        self.marks += 1
        self._marked = len(self._pieces)

    @property
    def unmarked(self) -> int:
        """Parts received since the last mark."""
        return len(self._pieces) - self._marked

    def commit(self) -> Sequence[tuple[HeldLease, int]]:
        """A step boundary: what is marked is final. Returns each lease concerned, and up to where it is committed."""
        if not self._marked:
            return ()
        came: list[tuple[HeldLease, int]] = []
        pieces = self._pieces
        for _ in range(self._marked):
            piece = pieces.popleft()
            held, hi = piece.held, piece.hi
            if self._run is None or self._run[0] is not held or piece.lo != self._run_hi:
                self._end_run()
                self._run = held, piece.lo
            self._run_hi = hi
            if came and came[-1][0] is held:
                came.pop()
            came.append((held, hi))
        self._marked = 0
        return came

    def drop(self) -> None:
        """Discard what is not committed: it is given back."""
        self._pieces.clear()
        self._marked = 0

    def forget(self) -> None:
        """A new attempt begins."""
        self.drop()
        self._done, self._run = {}, None
