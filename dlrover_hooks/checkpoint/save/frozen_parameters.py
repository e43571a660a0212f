"""Frozen parameters (LoRA's base weights) that a slot holds already and that need not be copied again.

A tensor's version alone is no proof: fused optimizers and writes through `.data` do not raise it. A tensor is left out
only if all of these hold: it is a parameter that no gradient and no optimizer touches; its address and version are
those of when this slot was filled; and 256 bytes of each 16 KiB of it, different ones at each save, equal those in the
slot. A change of 16 KiB or more in a row is found at once, a change of any single byte within `TURNS` saves. The keeper
compares the hashes of what was left out with the previous ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout

BLOCK_BYTES, _PART_BYTES = 16 << 10, 256
"""3 % of the time of a copy. 64 bytes of each 4 KiB, for example, take five times as long (measured)."""
TURNS = BLOCK_BYTES // _PART_BYTES
"""Number of saves in which every byte of the tensors left out is compared."""
Mark = tuple[int, int, int]
"""Address, bytes, version."""
Range = tuple[int, int]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Left(NamedTuple):
    """What a save leaves out because its slot holds it, and what the slot holds once the save is copied."""

    slot: tuple[int, int]
    """Segment, index."""
    recipe: CachedLayout
    marks: dict[int, Mark]
    """Of all frozen tensors, by place."""
    places: frozenset[int]
    whole: tuple[Range, ...]
    """The byte ranges covered by `places`."""


class Frozen:
    """What each slot holds of frozen tensors. One thread at a time.

    A slot counts as empty from `take` until `filled`, so the remains of an interrupted save are never used.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], tuple[int, dict[int, Mark]]] = {}
        self._turn = 0

    def take(self, slot: tuple[int, int], recipe: CachedLayout, marks: dict[int, Mark]) -> Left:
        """What need not be copied into `slot` because it is there; to be confirmed with `changed`."""
        number, filled = self._slots.pop(slot, (0, {}))
        same = number == recipe.number
        held = [place for place, mark in marks.items() if filled.get(place) == mark] if same else []
        whole = ranges(sorted(recipe.range(place) for place in held))
        places = frozenset(place for place in held if inside(recipe.range(place), whole))
        return Left(slot, recipe, marks, places, whole)

    def changed(self, left: Left, image: memoryview) -> int | None:
        """A place of those left out whose tensor differs from `image`; None if no difference is found."""
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
        """The save that left these out is copied completely."""
        self._slots[left.slot] = left.recipe.number, left.marks

    def forget(self) -> None:
        """Discard what is recorded of all slots."""
        self._slots.clear()


def _memory(address: int, nbytes: int) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def _parts(memory: Bytes, at: int) -> tuple[np.ndarray[Any, Any], Bytes]:
    """The part of each block at offset `at`, and all of the incomplete last block."""
    whole = len(memory) // BLOCK_BYTES * BLOCK_BYTES
    return memory[:whole].reshape(-1, BLOCK_BYTES)[:, at : at + _PART_BYTES].view(np.uint64), memory[whole:]


def ranges(extents: Sequence[Range]) -> tuple[Range, ...]:
    """The complete chunks inside the sorted `extents` (start, stop), after neighbours are joined.

    Only complete chunks have hashes that can be compared.
    """
    joined: list[Range] = []
    for start, stop in extents:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    inner = [(-(-start // CHUNK_BYTES) * CHUNK_BYTES, stop // CHUNK_BYTES * CHUNK_BYTES) for start, stop in joined]
    return tuple((start, stop) for start, stop in inner if start < stop)


def inside(extent: Range, whole: Sequence[Range]) -> bool:
    """Whether `extent` is inside one of the ranges."""
    return any(start <= extent[0] and extent[1] <= stop for start, stop in whole)
