"""What need not be copied again: frozen parameters (LoRA's base weights) that a slot holds already (facts: 2.H).

A tensor's version alone is no proof: fused optimizers and writes through `.data` do not raise it. A tensor is left out
only if it is a parameter that no gradient and no optimizer touches, its address and version are those of when this slot
was filled, and of each 16 KiB of it 256 bytes, other ones at each save, are what stands in the slot. So a change of
16 KiB in a row or more is found at once, and one of any byte within `TURNS` saves. The keeper compares the hashes of
what was left out with those of before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.tensors.layout_cache import Recipe

BLOCK_BYTES, _PART_BYTES = 16 << 10, 256
"""3 % of the time of a copy. 64 bytes of each 4 KiB, for one, take five times as long (measured)."""
TURNS = BLOCK_BYTES // _PART_BYTES
"""Saves in which every byte of what is left out is compared."""
Mark = tuple[int, int, int]
"""Address, bytes, version."""
Range = tuple[int, int]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Left(NamedTuple):
    """What a save leaves out because its slot holds it, and what the slot holds once that save is copied."""

    slot: tuple[int, int]
    """Segment, index."""
    recipe: Recipe
    marks: dict[int, Mark]
    """Of all that is frozen, by place."""
    places: frozenset[int]
    whole: tuple[Range, ...]
    """The byte ranges that `places` make up."""


class Frozen:
    """What each slot holds of frozen tensors. One thread at a time.

    A slot holds nothing from `take` until `filled`: whatever ends a save in between, what it left behind is not used.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], tuple[int, dict[int, Mark]]] = {}
        self._turn = 0

    def take(self, slot: tuple[int, int], recipe: Recipe, marks: dict[int, Mark]) -> Left:
        """What need not be copied into `slot` if it is there, as `changed` has to confirm."""
        number, filled = self._slots.pop(slot, (0, {}))
        same = number == recipe.number
        held = [place for place, mark in marks.items() if filled.get(place) == mark] if same else []
        whole = ranges(sorted(recipe.range(place) for place in held))
        places = frozenset(place for place in held if inside(recipe.range(place), whole))
        return Left(slot, recipe, marks, places, whole)

    def changed(self, left: Left, image: memoryview) -> int | None:
        """A place of those left out whose tensor is not what stands in `image`; None if all seem to be."""
        self._turn += 1
        at = self._turn % TURNS * _PART_BYTES
        for place in left.places:
            address, nbytes, _ = left.marks[place]
            start, stop = left.recipe.range(place)
            here, there = _memory(address, nbytes), np.frombuffer(image[start:stop], np.uint8)
            if not all(map(np.array_equal, _parts(here, at), _parts(there, at))):
                return place
        return None

    def filled(self, left: Left) -> None:
        """The save that left these out is copied as a whole."""
        self._slots[left.slot] = left.recipe.number, left.marks

    def forget(self) -> None:
        """No slot can be relied on."""
        self._slots.clear()


def _memory(address: int, nbytes: int) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def _parts(memory: Bytes, at: int) -> tuple[np.ndarray[Any, Any], Bytes]:
    """Of each block the part at that offset, and all of what is no whole block."""
    whole = len(memory) // BLOCK_BYTES * BLOCK_BYTES
    return memory[:whole].reshape(-1, BLOCK_BYTES)[:, at : at + _PART_BYTES].view(np.uint64), memory[whole:]


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
