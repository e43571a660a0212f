"""Three slots, sealed and resident."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from dlrover_hooks.checkpoint.memory.segment import NOTE_BYTES, SLOTS, SharedSegment
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation
from dlrover_hooks.rng.rank_journal import NOTES

RUN = "a" * 32


@pytest.fixture(params=["memfd", "file"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedSegment]:
    """Both kinds of memory keep one contract; the second one for real: tests/e2e/test_refused_system_calls.py."""
    if request.param == "file":
        monkeypatch.setattr("dlrover_hooks.checkpoint.memory.segment.shared_folder", lambda: "/dev/shm")
    made = SharedSegment.create(0, 1 << 20)
    yield made
    made.close()


def test_pages_are_resident_before_the_first_copy(shared: SharedSegment) -> None:
    """First touch of fresh shared memory costs eight times a copy: it must be over by now."""
    assert os.fstat(shared.fd).st_blocks * 512 >= SLOTS << 20
    twin = SharedSegment.attach(os.dup(shared.fd))
    data = b"x" * twin.slot_bytes
    before = faults()
    for index in range(SLOTS):
        twin.view(index)[:] = data
    assert faults() - before < 100  # there are 768 pages
    twin.close()


def faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_a_memfd_is_sealed() -> None:
    shared = SharedSegment.create(0, 1 << 20)
    for size in (4096, shared.nbytes * 2):
        with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
            os.ftruncate(shared.fd, size)
    shared.close()


def test_a_file_has_no_name_and_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is left behind, however its users end."""
    monkeypatch.setattr("dlrover_hooks.checkpoint.memory.segment.shared_folder", lambda: "/dev/shm")
    shared = SharedSegment.create(0, 1 << 20)
    found = os.fstat(shared.fd)
    assert (found.st_nlink, found.st_mode & 0o777, found.st_uid) == (0, 0o600, os.geteuid())
    shared.close()


def test_publish_is_seen_by_another_mapping(shared: SharedSegment) -> None:
    twin = SharedSegment.attach(os.dup(shared.fd))
    generation = Generation(3, 1 << 40, "0123456789abcdef" * 2)
    twin.begin(1)
    assert shared.slot(1).torn
    twin.view(1, 3)[:] = b"abc"
    twin.publish(1, generation, 70000, 70001, 3)
    slot = shared.slot(1)
    assert (slot.generation, slot.rank, slot.world_size, slot.image_bytes) == (generation, 70000, 70001, 3)
    assert not slot.torn
    assert bytes(shared.view(1, 3)) == b"abc"
    twin.close()


def test_free_rolls_torn_and_whole_back_and_changes_seq(shared: SharedSegment) -> None:
    shared.begin(0)
    shared.free(0)
    shared.begin(1)
    shared.publish(1, Generation(0, 1, RUN), 0, 1, 8)
    seq = shared.seq(1)
    shared.free(1)
    assert shared.seq(1) > seq
    assert [slot.generation for slot in shared.slots()] == [None] * 3
    assert not any(slot.torn for slot in shared.slots())


def test_the_larger_seq_is_the_later_image(shared: SharedSegment) -> None:
    order = list[int]()
    for index in (2, 2, 0, 1, 0):
        shared.begin(index)
        assert shared.slot(index).torn
        shared.publish(index, Generation(0, 1, RUN), 0, 1, 8)
        order.append(shared.seq(index))
    assert order == sorted(set(order))


def test_notes_are_seen_by_another_mapping(shared: SharedSegment) -> None:
    """Each place has its newest; what is too long is no note, and neither slots nor other notes feel any of it."""
    twin = SharedSegment.attach(os.dup(shared.fd))
    assert shared.notes() == []
    twin.begin(0)
    twin.note(0, b"first")
    twin.note(NOTES - 1, b"x" * (NOTE_BYTES - 16))
    twin.note(0, b"newer")
    assert shared.notes() == [b"newer", b"x" * (NOTE_BYTES - 16)]
    twin.note(NOTES - 1, b"y" * (NOTE_BYTES - 15))
    assert shared.notes() == [b"newer"]
    assert shared.slot(0).torn
    assert [slot.seq for slot in shared.slots()] == [1, 0, 0]
    assert not any(shared.view(0))
    twin.close()


def test_notes_as_large_as_they_were_asked_for() -> None:
    """A page more or less does not matter; slots lie behind them, on a page's border."""
    shared = SharedSegment.create(0, 1 << 20, note_bytes=3 * NOTE_BYTES - 100)
    twin = SharedSegment.attach(os.dup(shared.fd))
    assert shared.serves(1 << 20, 3 * NOTE_BYTES)
    assert not shared.serves(1 << 20, 3 * NOTE_BYTES + 1)
    for place in range(NOTES):
        twin.note(place, b"x" * (3 * NOTE_BYTES - 16))
    assert [len(note) for note in shared.notes()] == [3 * NOTE_BYTES - 16] * NOTES
    assert not any(shared.view(0))
    assert len(shared.view(SLOTS - 1)) == 1 << 20
    twin.close()
    shared.close()


def test_a_body_that_stays_is_found_behind_whatever_stands_before_it(shared: SharedSegment) -> None:
    """It is not written again where the same object is there already, at the same place."""
    one, other, long = b"one body" * 9, b"another body", b"x" * NOTE_BYTES
    bodies = (b"a", one), (b"b", one), (b"long", one), (b"b", other), (b"c", b""), (b"b", one), (b"d", one)
    for head, body in bodies:
        shared.note(1, head, body)
        assert shared.notes() == [head + body]
        shared.note(1, head, long)
        assert shared.notes() == []
    shared.note(1, b"d", one)
    assert shared.notes() == [b"d" + one]


def test_a_note_that_was_being_written_is_none(shared: SharedSegment) -> None:
    """Its writer ended in the middle of it: the note before it is gone, others are not."""
    shared.note(1, b"another")
    shared.note(0, b"before")
    broken: Any = "no bytes"
    with pytest.raises(TypeError):
        shared.note(0, b"behind it", broken)
    assert shared.notes() == [b"another"]
    shared.note(0, b"again")
    assert shared.notes() == [b"again", b"another"]


def test_read_only_mapping_cannot_write(shared: SharedSegment) -> None:
    twin = SharedSegment.attach(os.dup(shared.fd), writable=False)
    with pytest.raises(TypeError):
        twin.view(0)[0] = 1
    with pytest.raises(AssertionError):
        twin.begin(0)
    twin.close()


def test_foreign_memory_is_refused() -> None:
    fd = os.memfd_create("other")
    os.write(fd, b"x" * 8192)
    with pytest.raises(Corrupt):
        SharedSegment.attach(fd)
