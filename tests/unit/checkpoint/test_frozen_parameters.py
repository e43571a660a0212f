"""What is not copied again stands in the slot, or it is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.save.frozen_parameters import BLOCK_BYTES, TURNS, Frozen
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout

SLOT = (7, 1)


class Saves:
    """Frozen arrays that a slot holds."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        chance = np.random.default_rng(0)
        self.arrays = {f"w{i}": chance.integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
        self.recipe, self.frozen = CachedLayout(self.arrays), Frozen()
        self.image = memoryview(bytearray(self.recipe.layout.total_bytes))
        rows = zip(self.arrays.values(), self.recipe.places, strict=True)
        self.marks = {place: (array.ctypes.data, nbytes, 0) for place, (array, (_, nbytes)) in enumerate(rows)}
        for place, array in enumerate(self.arrays.values()):
            self.recipe.view(self.image, place)[:] = array.data
        self.frozen.filled(self.frozen.take(SLOT, self.recipe, self.marks))

    def save(self) -> tuple[frozenset[int], int | None]:
        left = self.frozen.take(SLOT, self.recipe, self.marks)
        changed = self.frozen.changed(left, self.image)
        self.frozen.filled(left)
        return left.places, changed


SIZES = (CHUNK_BYTES, 3 * CHUNK_BYTES + 4097, 5, CHUNK_BYTES, CHUNK_BYTES + 1)


def test_what_has_not_changed_is_left_out() -> None:
    saves = Saves(SIZES)
    for _ in range(TURNS):
        assert saves.save() == ({1, 2, 3}, None)


@pytest.mark.parametrize("at", [0, 1, BLOCK_BYTES - 1, 1_000_001, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 4096])
def test_every_byte_is_compared_in_turn(at: int) -> None:
    saves = Saves(SIZES)
    saves.arrays["w1"][at] ^= 1
    assert [saves.save()[1] for _ in range(TURNS)].count(1) >= 1


@pytest.mark.parametrize("at", [0, 1, BLOCK_BYTES - 1, 1_000_001])
def test_a_block_in_a_row_is_noticed_at_once(at: int) -> None:
    saves = Saves(SIZES)
    saves.arrays["w1"][at : at + BLOCK_BYTES] += 1
    for _ in range(TURNS):
        assert saves.save()[1] == 1


@pytest.mark.parametrize("change", ["address", "version", "recipe", "slot", "a save that did not end"])
def test_nothing_else_is_taken_for_what_the_slot_holds(change: str) -> None:
    saves = Saves(SIZES)
    address, nbytes, version = saves.marks[1]
    marks = saves.marks | {1: (address + 64 * (change == "address"), nbytes, version + (change == "version"))}
    recipe = CachedLayout(saves.arrays) if change == "recipe" else saves.recipe
    if change.startswith("a save"):
        saves.frozen.take(SLOT, recipe, marks)
    left = saves.frozen.take((7, 2) if change == "slot" else SLOT, recipe, marks)
    assert 1 not in left.places
