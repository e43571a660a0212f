"""When a hashed slot counts; bit flips in what a trainer did not copy again are found, and only those."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, inside
from dlrover_hooks.checkpoint.memory.keeper_segments import HashedSlot, Replicas, Segment, prove
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation

RUN, SIZE = "a" * 32, 2 * CHUNK_BYTES + 100
ALL = ((0, SIZE),)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(3, SharedSegment.create(3, SIZE))
    yield made
    made.shared.close()


def publish(segment: Segment, step: int, *unchanged: tuple[int, int], index: int = 0) -> int:
    segment.shared.begin(index)
    segment.shared.publish(index, Generation(0, step, RUN), 0, 1, SIZE)
    seq = segment.shared.seq(index)
    segment.published(index, seq, unchanged)
    return seq


def proved(segment: Segment, seq: int, index: int = 0) -> HashedSlot:
    proof = prove(segment.shared, index, seq)
    assert proof is not None
    return proof


def flip(segment: Segment, at: int) -> None:
    segment.shared.view(0)[at] ^= 1


@pytest.mark.parametrize(
    ("ranges", "chunks"),
    [
        ((), set()),
        (ALL, {0, 1, 2}),
        (((1, SIZE),), {1, 2}),
        (((0, SIZE - 1),), {0, 1}),
        (((0, CHUNK_BYTES - 1), (CHUNK_BYTES + 1, SIZE - 1)), set()),
        (((0, CHUNK_BYTES), (CHUNK_BYTES, 2 * CHUNK_BYTES)), {0, 1}),
    ],
)
def test_whole_chunks_of_ranges(ranges: tuple[tuple[int, int], ...], chunks: set[int]) -> None:
    assert inside(ranges, SIZE) == chunks


def test_a_slot_overwritten_before_it_was_hashed_is_no_damage(segment: Segment) -> None:
    """A fast trainer: what it kept was never hashed, so there is nothing to compare with, yet."""
    first = publish(segment, 1)
    seq = publish(segment, 2, *ALL)
    assert prove(segment.shared, 0, first) is None
    assert segment.accept(proved(segment, seq))
    flip(segment, 5)
    with pytest.raises(Corrupt, match=r"slot 0 of seat 3, step 3.*chunk 0, not copied again"):
        segment.accept(proved(segment, publish(segment, 3, *ALL)))
    assert segment.valid() == []


def test_what_is_copied_again_need_not_be_what_it_was(segment: Segment) -> None:
    assert segment.accept(proved(segment, publish(segment, 1)))
    flip(segment, 5)
    assert segment.accept(proved(segment, publish(segment, 2, (CHUNK_BYTES, SIZE))))
    assert segment.accept(proved(segment, publish(segment, 3, *ALL)))


def test_damage_stays_damage_until_it_is_copied_over(segment: Segment) -> None:
    """However often it is hashed, and also where the trainer has not heard of it when it saves again."""
    assert segment.accept(proved(segment, publish(segment, 1)))
    flip(segment, SIZE - 1)
    seq = publish(segment, 2, *ALL)
    with pytest.raises(Corrupt, match="chunk 2"):
        segment.accept(proved(segment, seq))
    assert not segment.accept(proved(segment, seq))
    assert segment.proved(segment.shared.slot(0)), "nobody hashes it once more"
    with pytest.raises(Corrupt):
        segment.accept(proved(segment, publish(segment, 3, *ALL)))
    assert segment.accept(proved(segment, publish(segment, 4)))


def test_a_slot_that_hashes_otherwise_than_before_counts_no_more(segment: Segment) -> None:
    seq = publish(segment, 1)
    assert segment.accept(proved(segment, seq))
    assert not segment.accept(proved(segment, seq)), "no news"
    flip(segment, CHUNK_BYTES)
    with pytest.raises(Corrupt, match="chunk 1 did not match its hash"):
        segment.accept(proved(segment, seq))
    assert segment.valid() == []
    assert not segment.accept(proved(segment, seq))


def test_a_late_hash_takes_no_newer_ones_place(segment: Segment) -> None:
    old = proved(segment, publish(segment, 1))
    new = proved(segment, publish(segment, 2))
    assert segment.accept(new)
    assert not segment.accept(old)
    assert [proof.slot.generation.step for proof in segment.valid() if proof.slot.generation] == [2]


def test_room_for_a_replica_that_was_let_go_before_it_was_filled(segment: Segment) -> None:
    """`Forget` may come between `add` and `begin`: the sender of the image makes room again."""
    replicas = Replicas()
    replicas.add(segment)
    replicas.forget("b" * 32)
    assert replicas.begin(segment.home, segment.seat) is None
    replicas.add(segment)
    assert replicas.begin(segment.home, segment.seat) is not None
