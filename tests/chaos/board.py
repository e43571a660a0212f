"""Words that all processes of a chaos test share, and that outlive any of them: what each rank did, what is armed."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from dlrover_hooks.protocol import Generation

RANKS, RING = 4, 8
_HEAD, _ROW = 8, 16
Age = tuple[int, int]
"""Attempt and step."""
NOTHING: Age = (0, 0)


def pack(age: Age) -> int:
    return age[0] << 32 | age[1]


def unpack(word: int) -> Age:
    return int(word) >> 32, int(word) & 0xFFFFFFFF


def age(generation: Generation | None) -> Age:
    return NOTHING if generation is None else (generation.attempt, generation.step)


class Board:
    """One writer for each word: the test for the head, a rank for its row."""

    def __init__(self, path: Path) -> None:
        size = 8 * (_HEAD + RANKS * _ROW)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._words = np.frombuffer(self._map, np.uint64)

    def _row(self, rank: int) -> np.ndarray:
        return self._words[_HEAD + rank * _ROW :][:_ROW]

    # ---- by the test

    def arm(self, phase: int) -> None:
        """Whoever comes to that phase says so, and waits. 0: nobody does."""
        self._words[0] = phase

    def finish(self, step: int) -> None:
        """Let the trainers end their run at that step."""
        self._words[1] = step

    # ---- by all

    @property
    def armed(self) -> int:
        return int(self._words[0])

    @property
    def last_step(self) -> int:
        """Where the run ends; 0: not known yet."""
        return int(self._words[1])

    # ---- by a rank

    def begin(self, rank: int, now: Age, restored: Age) -> None:
        """A life begins after `restored`, which it holds."""
        row = self._row(rank)
        row[2:] = 0
        row[1] = pack(restored)
        row[0] = pack(now)

    def reach(self, rank: int, now: Age) -> None:
        """It begins to save that step."""
        self._row(rank)[0] = pack(now)

    def published(self, rank: int, now: Age, saved: bool) -> None:
        """Its save has returned."""
        row = self._row(rank)
        if saved:
            row[4 + now[1] % RING] = pack(now)
        else:
            row[3] = pack(now)

    def heard(self, rank: int, complete: Age) -> None:
        """The master has told it that this is complete over all ranks, and its keeper knows."""
        self._row(rank)[2] = pack(complete)

    # ---- what follows from it

    def reached(self, rank: int) -> Age:
        """What it has begun to save."""
        return unpack(self._row(rank)[0])

    def together(self, world: int, now: Age) -> bool:
        """All ranks have come to this step: as after an all-reduce."""
        return all(self.reached(rank) >= now for rank in range(world))

    def newest(self, world: int) -> Age:
        return max(self.reached(rank) for rank in range(world))

    def whole(self, world: int) -> Age:
        """The newest that must be whole in memory: restored, heard of as complete, or published by all ranks.

        The last one counts only if no rank left a save out near it: its slot may be used again then.
        """
        rows = [self._row(rank).copy() for rank in range(world)]
        known = min(max(unpack(row[1]), unpack(row[2])) for row in rows)
        common = set.intersection(*({unpack(word) for word in row[4 : 4 + RING]} for row in rows))
        newest = max(common, default=NOTHING)
        skipped = max(unpack(row[3]) for row in rows)
        return max(known, newest) if skipped < (newest[0], max(newest[1] - 4, 0)) else known

    def skipping(self, world: int) -> Age:
        """The newest step that some rank did not save."""
        return max(unpack(self._row(rank)[3]) for rank in range(world))
