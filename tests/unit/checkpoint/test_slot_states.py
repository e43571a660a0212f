"""What counts in a segment, event by event, on a slot table that the test writes: no shared memory, no hashes."""

from __future__ import annotations

import contextlib

import pytest

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.memory.segment import SLOTS, Slot
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot, SlotStates
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation

RUN, OTHER, SIZE = "a" * 32, "b" * 32, 2 * CHUNK_BYTES
KEPT = ((0, CHUNK_BYTES),)


class Table:
    """A slot table, and the events that follow from writing it."""

    def __init__(self) -> None:
        self.lines = [Slot(index, 0) for index in range(SLOTS)]
        self.states = SlotStates(3, self)

    def seq(self, index: int) -> int:
        return self.lines[index].seq

    def slot(self, index: int) -> Slot:
        return self.lines[index]

    def slots(self) -> list[Slot]:
        return self.lines

    def write(self, index: int, step: int, *, rank: int = 0, world: int = 1) -> Slot:
        self.lines[index] = Slot(index, self.seq(index) + 2, Generation(0, step, RUN), SIZE, rank, world)
        return self.lines[index]

    def publish(self, index: int, step: int, ranges: tuple[tuple[int, int], ...] = (), *, world: int = 1) -> Slot:
        slot = self.write(index, step, world=world)
        self.states.published(index, slot.seq, ranges)
        return slot

    def hash(self, slot: Slot, *chunks: str) -> bool:
        return self.states.accept(HashedSlot(slot, chunks or ("x", "y")))

    def valid(self) -> list[int]:
        return [proof.slot.index for proof in self.states.valid()]


def test_an_image_counts_from_its_hash_until_its_slot_is_written() -> None:
    table = Table()
    slot = table.publish(0, 1)
    assert table.valid() == []
    assert not table.states.proved(slot)
    assert table.hash(slot)
    assert table.valid() == [0]
    assert table.states.proved(slot)
    table.lines[0] = Slot(0, slot.seq + 1)
    assert table.valid() == [], "torn"
    assert not table.hash(slot), "no news"


@pytest.mark.parametrize("hashed_first", [False, True])
def test_a_copy_saved_again_makes_the_older_one_void(hashed_first: bool) -> None:
    """Its hash may still be in progress."""
    table = Table()
    old = table.publish(0, 1)
    if hashed_first:
        assert table.hash(old)
    new = table.publish(1, 1)
    assert table.states.proved(old), "nobody hashes it any more"
    assert not table.hash(old)
    assert table.hash(new)
    assert table.valid() == [1]


def test_a_single_rank_image_supersedes_none_of_a_larger_world() -> None:
    table = Table()
    assert table.hash(table.publish(0, 1, world=2))
    assert table.hash(table.publish(1, 1, world=1))
    assert table.valid() == [0, 1]


def test_the_table_is_ahead_of_the_messages() -> None:
    """The older message finds both copies in the table, and takes the newer one for the older one."""
    table = Table()
    old, new = table.write(0, 1), table.write(1, 1)
    table.states.published(0, old.seq, ())
    assert not table.hash(new)
    table.states.published(1, new.seq, ())
    assert not table.hash(old)
    assert table.hash(new)
    assert table.valid() == [1]


def test_damage_lasts_until_every_damaged_chunk_is_copied() -> None:
    table = Table()
    slot = table.publish(0, 1)
    assert table.hash(slot)
    table.states.refute(slot)
    assert table.valid() == []
    assert not table.hash(slot), "not even if it looks well now"
    kept = table.publish(0, 2, KEPT)
    with pytest.raises(Corrupt, match=r"slot 0 of seat 3.*chunk 0, not copied again"):
        table.hash(kept)
    assert table.hash(table.publish(0, 3))
    assert table.valid() == [0]


def test_damage_of_an_overwritten_image_leaves_the_newer_one() -> None:
    """A transfer or a write can find it late, when the next image in that slot is hashed already."""
    table = Table()
    old = HashedSlot(table.publish(0, 1), ("x", "y"))
    assert table.states.accept(old)
    new = HashedSlot(table.publish(0, 2), ("x", "y"))
    assert table.states.accept(new)
    table.states.refute(old.slot)
    assert table.valid() == [0]
    table.states.refute(new.slot)
    assert table.valid() == []
    assert table.states.proved(new.slot), "it is not to be hashed again: the damage would get a valid hash"


@pytest.mark.parametrize("between", [0, 1])
def test_a_hash_that_comes_late_is_compared_with_what_is_still_there(between: int) -> None:
    """Chunk 0 is copied by the save between and not by the last one: it differs rightly from the late hash."""
    table = Table()
    late = table.publish(0, 1)
    for step in range(between):
        table.publish(0, 2 + step)
    last = table.publish(0, 9, KEPT)
    assert table.states.accept(HashedSlot(late, ("old", "y")))
    found = HashedSlot(last, ("new" if between else "old", "z"))
    assert table.states.accept(found)
    assert table.valid() == [0]


@pytest.mark.parametrize("marked", [False, True])
def test_a_hash_that_comes_late_does_not_hide_damage(marked: bool) -> None:
    """Chunk 0 was damaged after its first hash, and was not copied since: no hash of it is right, whenever it comes."""
    table = Table()
    first = table.publish(0, 1)
    assert table.hash(first, "good", "y")
    if marked:
        table.states.refute(first)
    late = table.publish(0, 2, KEPT)
    last = table.publish(0, 3, KEPT)
    with contextlib.suppress(Corrupt):
        table.hash(late, "bad", "y")
    with pytest.raises(Corrupt, match="chunk 0, not copied again"):
        table.hash(last, "bad", "y")
    assert table.valid() == []


def test_a_dropped_slot_does_not_count() -> None:
    table = Table()
    assert table.hash(table.publish(0, 1))
    table.states.drop(0)
    table.states.drop(0)
    assert table.valid() == []


def test_which_slots_memory_may_be_taken_from() -> None:
    """Never those that may be the newest complete ones, or are being written, as long as they hold an image."""
    table = Table()
    slot = table.publish(0, 5)
    before, this, after = (Generation(0, step, RUN) for step in (4, 5, 6))
    needed = table.states.needed
    assert needed(slot, None, ()), "it may be complete"
    assert needed(slot, before, ())
    assert needed(slot, this, ())
    assert not needed(slot, after, ())
    assert needed(slot, after, (this,)), "it is being written"
    assert not needed(slot, Generation(0, 1, OTHER), ())
    assert not needed(Slot(1, 1, this, SIZE), None, (this,)), "torn"
    assert not needed(Slot(1, 2), None, (this,)), "free"
    table.states.refute(slot)
    assert not needed(slot, None, (this,)), "its file fails anyhow"
