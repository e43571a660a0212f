"""What of the leased batches is in the model: received, marked, committed. Pure; training thread only."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dlrover_hooks.data.leases import Held
from dlrover_hooks.ranges import Ranges


class Piece(NamedTuple):
    """Positions [lo, hi) of a lease."""

    held: Held
    lo: int
    hi: int


class Tally:
    """Pieces in the order in which the loop received them. `done`: committed since the attempt began, by partition."""

    def __init__(self) -> None:
        self.done: dict[str, Ranges] = {}
        self.marks = 0
        """How often the optimizer stepped."""
        self._pieces: deque[Piece] = deque()
        self._marked = 0

    def received(self, piece: Piece) -> None:
        """The loop got it."""
        self._pieces.append(piece)

    def mark(self) -> None:
        """The optimizer stepped: what was received so far is in the model once the step is entirely over."""
        self.marks += 1
        self._marked = len(self._pieces)

    @property
    def unmarked(self) -> int:
        """Pieces received since the last mark."""
        return len(self._pieces) - self._marked

    def commit(self) -> list[tuple[Held, int]]:
        """A quiet point: what is marked is in the model for good. Each lease touched, and how far it came."""
        came: list[tuple[Held, int]] = []
        pieces = self._pieces
        for _ in range(self._marked):
            held, lo, hi = pieces.popleft()
            done = self.done.get(held.partition)
            if done is None:
                done = self.done[held.partition] = Ranges()
            done.add(lo, hi)
            if came and came[-1][0] is held:
                came.pop()
            came.append((held, hi))
        self._marked = 0
        return came

    def drop(self) -> None:
        """What is not committed is not done here: it goes back."""
        self._pieces.clear()
        self._marked = 0

    def forget(self) -> None:
        """A new attempt begins."""
        self.drop()
        self.done.clear()
