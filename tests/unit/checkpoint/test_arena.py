"""DL-90: three slots, sealed and resident; the newest whole generation is never the one written over."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_hooks.checkpoint.arena import SLOTS, Arena, Slot, choose_slot
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation

RUN, OLD = "a" * 32, "b" * 32
GENERATIONS = st.builds(Generation, st.integers(0, 2), st.integers(0, 4), st.sampled_from([RUN, OLD]))
LINES = st.tuples(st.booleans(), st.none() | GENERATIONS)


@given(st.lists(LINES, min_size=SLOTS, max_size=SLOTS), st.none() | GENERATIONS, st.sets(GENERATIONS, max_size=2))
def test_chosen_slot_is_never_a_needed_one(
    lines: list[tuple[bool, Generation | None]], complete: Generation | None, persisting: set[Generation]
) -> None:
    slots = [Slot(i, 2 * i + torn, generation, 1, 0, 1) for i, (torn, generation) in enumerate(lines)]
    index = choose_slot(slots, complete, persisting, run=RUN)
    whole = [slot for slot in slots if not slot.torn and slot.generation is not None]
    free = [slot for slot in slots if slot not in whole]
    mine = [slot for slot in whole if slot.generation and slot.generation.run == RUN] or whole
    newest = max(((s.generation.attempt, s.generation.step) for s in mine if s.generation), default=None)
    if index is None:
        assert not free
        return
    chosen = slots[index]
    if free:
        assert chosen in free
        return
    assert chosen.generation != complete
    assert chosen.generation not in persisting
    assert chosen.generation is not None
    others = [
        s for s in mine if s.generation and (s.generation.attempt, s.generation.step) == newest and s is not chosen
    ]
    assert others, "the newest published generation was chosen"


@given(st.sets(st.integers(0, 50), min_size=3, max_size=3))
def test_without_marks_the_oldest_is_chosen(steps: set[int]) -> None:
    slots = [Slot(i, 2, Generation(0, step, RUN), 1, 0, 1) for i, step in enumerate(steps)]
    assert choose_slot(slots, None, ()) == min(slots, key=lambda slot: slot.generation.step).index  # type: ignore[union-attr]


def test_nothing_free_is_none() -> None:
    slots = [Slot(i, 2, Generation(0, i, RUN), 1, 0, 1) for i in range(3)]
    assert choose_slot(slots, Generation(0, 0, RUN), {Generation(0, 1, RUN)}) is None


def test_what_never_got_complete_gives_way_at_steps_all_ranks_agree_on() -> None:
    """Or two ranks that have left out different steps would never again have one in common (DL-90)."""
    slots = [Slot(i, 2, Generation(0, held, RUN), 1, 0, 2) for i, held in enumerate((4, 5, 8))]

    def chosen(step: int, complete: int, *persisting: int) -> int | None:
        pinned = {Generation(0, one, RUN) for one in persisting}
        return choose_slot(slots, Generation(0, complete, RUN), pinned, run=RUN, step=step)

    assert chosen(16, 5, 4) == 2
    assert chosen(15, 5, 4) is None, "not a step to give way at"
    assert chosen(16, 5, 4, 8) is None, "it is being persisted"
    assert chosen(16, 8, 4) == 1, "it is complete"
    slots[2] = Slot(2, 2, Generation(0, 9, RUN), 1, 0, 2)
    assert chosen(16, 5, 4) is None, "it may still get complete"


@pytest.fixture(params=["memfd", "file"])
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Both kinds of memory keep the same contract; tests/e2e/test_fallback.py has the second one for real."""
    if request.param == "file":
        monkeypatch.setattr("dlrover_hooks.checkpoint.arena.shared_folder", lambda: "/dev/shm")
    made = Arena.create(0, 1 << 20)
    yield made
    made.close()


def test_pages_are_resident_before_the_first_copy(arena: Arena) -> None:
    """First touch of fresh shared memory costs eight times a copy: it must be over by now."""
    assert os.fstat(arena.fd).st_blocks * 512 >= SLOTS << 20
    twin = Arena.attach(os.dup(arena.fd))
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
    arena = Arena.create(0, 1 << 20)
    for size in (4096, arena.nbytes * 2):
        with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
            os.ftruncate(arena.fd, size)
    arena.close()


def test_a_file_has_no_name_and_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is left behind, however its users end."""
    monkeypatch.setattr("dlrover_hooks.checkpoint.arena.shared_folder", lambda: "/dev/shm")
    arena = Arena.create(0, 1 << 20)
    found = os.fstat(arena.fd)
    assert (found.st_nlink, found.st_mode & 0o777, found.st_uid) == (0, 0o600, os.geteuid())
    arena.close()


def test_publish_is_seen_by_another_mapping(arena: Arena) -> None:
    twin = Arena.attach(os.dup(arena.fd))
    generation = Generation(3, 1 << 40, "0123456789abcdef" * 2)
    twin.begin(1)
    assert arena.slot(1).torn
    twin.view(1, 3)[:] = b"abc"
    twin.publish(1, generation, 70000, 70001, 3)
    slot = arena.slot(1)
    assert (slot.generation, slot.rank, slot.world_size, slot.image_bytes) == (generation, 70000, 70001, 3)
    assert not slot.torn
    assert bytes(arena.view(1, 3)) == b"abc"
    twin.close()


def test_free_rolls_torn_and_whole_back_and_changes_seq(arena: Arena) -> None:
    arena.begin(0)
    arena.free(0)
    arena.begin(1)
    arena.publish(1, Generation(0, 1, RUN), 0, 1, 8)
    seq = arena.seq(1)
    arena.free(1)
    assert arena.seq(1) > seq
    assert [slot.generation for slot in arena.slots()] == [None] * 3
    assert not any(slot.torn for slot in arena.slots())


def test_read_only_mapping_cannot_write(arena: Arena) -> None:
    twin = Arena.attach(os.dup(arena.fd), writable=False)
    with pytest.raises(TypeError):
        twin.view(0)[0] = 1
    with pytest.raises(AssertionError):
        twin.begin(0)
    twin.close()


def test_foreign_memory_is_refused() -> None:
    fd = os.memfd_create("other")
    os.write(fd, b"x" * 8192)
    with pytest.raises(Corrupt):
        Arena.attach(fd)
