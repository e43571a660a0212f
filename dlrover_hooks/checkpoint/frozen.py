"""What need not be copied again: frozen parameters (LoRA's base weights) that a slot holds already (facts: 2.H).

A tensor's version alone is no proof, fused optimizers do not raise it. A tensor is left out only if it is a parameter
that no gradient and no optimizer touches, and its address and version are those of when this slot was filled. Even so
everything is copied again every `FULL_EVERY` saves, and the keeper compares the hashes of what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlrover_hooks.checkpoint.chunks import CHUNK_BYTES

FULL_EVERY = 16
Mark = tuple[int, int, int]
"""Address, bytes, version."""
Range = tuple[int, int]


class _Filled(NamedTuple):
    recipe: int
    marks: dict[int, Mark]
    saves: int


class Frozen:
    """What each slot holds of frozen tensors. Training thread."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], _Filled] = {}

    def held(self, slot: tuple[int, int], recipe: int, marks: dict[int, Mark]) -> set[int]:
        """The places whose tensors `slot` (segment, index) holds as they are. It counts as filled with `marks` now."""
        filled = self._slots.get(slot)
        if filled is None or filled.recipe != recipe or filled.saves >= FULL_EVERY:
            self._slots[slot] = _Filled(recipe, marks, 1)
            return set()
        self._slots[slot] = _Filled(recipe, marks, filled.saves + 1)
        return {place for place, mark in marks.items() if filled.marks.get(place) == mark}

    def forget(self, slot: tuple[int, int] | None = None) -> None:
        """A slot (None: any) was not filled after all, or no longer holds what it was filled with."""
        if slot is None:
            self._slots.clear()
        else:
            self._slots.pop(slot, None)


def ranges(extents: Sequence[Range]) -> tuple[Range, ...]:
    """The whole chunks inside neighbouring `extents` (start, stop), which are sorted: only those can be compared."""
    joined: list[Range] = []
    for start, stop in extents:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    inner = [(-(-start // CHUNK_BYTES) * CHUNK_BYTES, stop // CHUNK_BYTES * CHUNK_BYTES) for start, stop in joined]
    return tuple((start, stop) for start, stop in inner if start < stop)


def inside(extent: Range, whole: Sequence[Range]) -> bool:
    """Does `extent` lie in one of the ranges?"""
    return any(start <= extent[0] and extent[1] <= stop for start, stop in whole)
