"""Notes in a real keeper's memory: what a trainer leaves to its successor (decision 0015)."""

from __future__ import annotations

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from tests.e2e.kept import Kept, segment, state
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


def test_notes_outlive_whom_they_are_of_and_its_memory(kept: Kept) -> None:
    """Those of all seats are read, whichever asks; larger memory takes them along."""
    kept.keeper()
    first, second = kept.trainer(0), kept.trainer(1, rank=1, world=2)
    first.notes.leave(0, b"there is no memory yet")
    assert first.save(1, state(1)) is not None
    first.notes.leave(2, b"in the step")
    kept.notice(keeper_messages.Hashed)
    assert first.save(2, state(2, 1 << 20)) is not None
    first.complete(kept.notice(keeper_messages.Hashed).generation)
    assert {one.generation.step for one in first.held()} == {2}, "the smaller memory is gone"
    first.close()
    assert sorted(second.notes.recall()) == [b"in the step", b"there is no memory yet"]


def test_larger_notes_are_expected(kept: Kept) -> None:
    """Memory that was there before is given up for one with room for them, and what was left meanwhile is in it. That
    stays so in larger memory, and for the next trainer of this seat, which takes over what is there.
    """
    kept.keeper()
    trainer = kept.trainer()
    trainer.prepare(0)
    until(lambda: trainer.ready, "memory")
    large = b"x" * (1 << 20)
    trainer.notes.leave(0, large)
    assert trainer.notes.recall() == ()
    trainer.notes.expect(len(large))
    until(lambda: trainer.notes.recall() == (large,), "the note")
    assert trainer.save(1, state(1, 1 << 20)) is not None
    assert trainer.notes.recall() == (large,)
    trainer.close()
    following = kept.trainer()
    following.notes.expect(len(large))
    assert following.save(2, state(2, 1 << 20)) is not None
    assert following.notes.recall() == (large,)


def test_no_note_is_left_in_memory_that_was_given_up(kept: Kept) -> None:
    """It is read as long as it is there: an old word would be taken for the newest once that is written over. What
    another trainer of this seat has left stays.
    """
    keeper = kept.keeper()
    first = kept.trainer()
    assert first.save(1, state(1)) is not None
    first.notes.leave(0, b"of the first")
    first.close()
    second = kept.trainer()
    second.notes.leave(2, b"of the second")
    second.prepare(0)
    until(lambda: second.ready, "memory")
    old = segment(keeper.pid)
    assert second.notes.recall() == (b"of the first", b"of the second")
    second.notes.expect(1 << 20)
    until(lambda: old.notes() == [b"of the first"], "other memory")
    assert sorted(second.notes.recall()) == [b"of the first", b"of the second"]
    old.close()


def test_there_are_no_notes_without_a_keeper(kept: Kept) -> None:
    assert kept.trainer(deadline_s=0.1).notes.recall() == ()
