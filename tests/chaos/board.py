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

    def store(self, mode: int) -> None:
        """How storage behaves, see `traps.Store`."""
        self._words[2] = mode

    def arm(self, phase: int) -> None:
        """A process that comes to that phase says so, and waits. 0: none does."""
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

    @property
    def stored(self) -> int:
        return int(self._words[2])

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

    def published(self, rank: int, now: Age, saved: bool, blind: bool) -> None:
        """Its save has returned. `blind`: it knew nothing of the others, for the master was away."""
        row = self._row(rank)
        if blind:
            row[14] = pack(now)
        row[12 if saved else 13] += np.uint64(1)
        if saved:
            row[4 + now[1] % RING] = pack(now)
        else:
            row[3] = pack(now)

    def overwrites(self, rank: int, gone: Age) -> None:
        """It is about to save over that step, blindly: however far it comes, that one is not whole any more."""
        ring = self._row(rank)[4 : 4 + RING]
        ring[ring == pack(gone)] = 0

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

    def known(self, world: int) -> Age:
        """What all ranks have restored, or heard of as complete."""
        rows = [self._row(rank) for rank in range(world)]
        return min(max(unpack(row[1]), unpack(row[2])) for row in rows)

    def whole(self, world: int) -> Age:
        """The newest that must be whole in memory: restored, heard of as complete, or published by all ranks.

        Nothing, if near it a rank has left a save out and one has saved blindly, as it does while the master is away.
        """
        rows = [self._row(rank).copy() for rank in range(world)]
        common = set.intersection(*({unpack(word) for word in row[4 : 4 + RING]} for row in rows))
        newest = max(max(common, default=NOTHING), self.known(world))
        near = (newest[0], max(newest[1] - RING // 2, 0))
        skipped, blind = (max(unpack(row[word]) for row in rows) for word in (3, 14))
        return NOTHING if skipped != NOTHING and min(skipped, blind) >= near else newest

    def story(self, world: int) -> str:
        """Of each rank: where it is, what it restored, heard of, left out and saved blindly last, and what it saved."""
        rows = [[unpack(word) for word in (*self._row(rank)[:4], *self._row(rank)[14:15], *self._row(rank)[4:12])]
                for rank in range(world)]  # fmt: skip
        return "\n".join(f"rank {rank}: {row[:5]} {sorted(row[5:])}" for rank, row in enumerate(rows))

    def made(self, rank: int, now: Age) -> bool:
        """It has published that step."""
        return pack(now) in self._row(rank)[4 : 4 + RING]

    def steps(self, rank: int) -> int:
        """Of this life, that it has begun to save."""
        row = self._row(rank)
        return unpack(row[0])[1] - unpack(row[1])[1]

    def saves(self, rank: int) -> tuple[int, int]:
        """Made and skipped in this life."""
        row = self._row(rank)
        return int(row[12]), int(row[13])
