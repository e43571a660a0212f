"""One rank's generations: what is persisted, reported and withdrawn, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.checkpoint.memory.segment import Slot
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.protocol import Cadence, Generation

RUN = "0" * 32


def generation(step: int) -> Generation:
    return Generation(1, step, RUN)


def picks(steps: list[int], start: int, heard_after: int) -> list[int]:
    """What a rank persists that hears of `persist_from=start` once it has made `heard_after` of its saves."""
    tracker, found = GenerationTracker(), []
    for number, step in enumerate([*steps, None]):
        if number >= heard_after:
            found += [one.step for one in tracker.plan(Cadence(1, start)).ordered]
        if step is not None:
            tracker.hashed(generation(step))
    return found + [one.step for one in tracker.plan(Cadence(1, start)).ordered]


@given(
    steps=st.lists(st.integers(1, 200), min_size=1, max_size=16, unique=True).map(sorted),
    start=st.integers(1, 200),
    heard=st.lists(st.integers(0, 16), min_size=2, max_size=4),
)
def test_all_ranks_pick_the_same_generation_whenever_they_hear(steps: list[int], start: int, heard: list[int]) -> None:
    """The first saved step at or after `persist_from`, once."""
    found = [picks(steps, start, min(moment, len(steps))) for moment in heard]
    wanted = [step for step in steps if step >= start][:1]
    assert found == [wanted] * len(heard)


def test_each_new_persist_from_picks_again() -> None:
    tracker = GenerationTracker()
    tracker.hashed(generation(3))
    assert tracker.plan(Cadence(1)).ordered == ()
    assert tracker.plan(Cadence(1, 2)).ordered == (generation(3),)
    tracker.ended(generation(3), stored=True)
    assert tracker.plan(Cadence(1, 2)).ordered == ()
    assert tracker.plan(Cadence(1, 4)).ordered == ()
    tracker.hashed(generation(5))
    assert tracker.plan(Cadence(1, 4)).ordered == (generation(5),)


def test_passed_waits_for_a_late_hash_only_while_a_slot_can_hold_it() -> None:
    """The slot of step 4 was used again before the hash was reported."""
    tracker = GenerationTracker()
    for step in (4, 5, 6, 7):
        tracker.saved(generation(step))
    tracker.hashed(generation(4))
    assert tracker.passed == 5
    for step in (5, 7, 6):
        tracker.hashed(generation(step))
    assert tracker.passed == 8
    tracker.skipped(generation(8))
    assert tracker.passed == 9


def test_only_one_slot_is_reserved_for_files_except_for_the_last_one() -> None:
    tracker = GenerationTracker()
    for step in (1, 2, 3):
        tracker.hashed(generation(step))
    assert tracker.plan(Cadence(1, 1)).ordered == (generation(1),)
    refused = tracker.plan(Cadence(1, 2))
    assert refused.ordered == ()
    assert [one for one, _ in refused.failed] == [generation(2)]
    assert tracker.failed(generation(2))
    assert tracker.plan(Cadence(1), generation(3)).ordered == (generation(3),)
    assert set(tracker.pending) == {generation(1), generation(3)}


def test_a_planned_file_whose_slot_was_used_again_before_it_was_hashed_has_failed() -> None:
    tracker = GenerationTracker()
    tracker.saved(generation(1))
    assert tracker.plan(Cadence(1, 1)) == ((), ())
    assert tracker.pending == (generation(1),)
    tracker.hashed(generation(2))
    assert [one for one, _ in tracker.plan(Cadence(1, 1)).failed] == [generation(1)]
    assert tracker.pending == ()
    assert tracker.retry(generation(1))
    assert not tracker.retry(generation(1))


def test_a_file_that_the_storage_refused_is_not_saved_again() -> None:
    """The reason is on its way to the reporter; a copy made until then would only take another slot."""
    tracker = GenerationTracker()
    tracker.ended(generation(1), stored=False, refused=True)
    assert tracker.failed(generation(1))
    assert not tracker.retry(generation(1))
    tracker.ended(generation(1), stored=False)
    assert tracker.retry(generation(1))


def test_a_notice_that_precedes_the_list_of_pending_files_counts() -> None:
    tracker = GenerationTracker()
    tracker.ended(generation(1), stored=True)
    tracker.allocated(None, (generation(1), generation(2)))
    assert tracker.pending == (generation(2),)


@pytest.mark.parametrize("answered", [True, False])
def test_a_counted_memory_vote_keeps_its_slot_though_a_later_vote_for_it_is_lost(answered: bool) -> None:
    """It may be complete meanwhile: only a memory vote that never arrived may be withdrawn."""
    tracker = GenerationTracker()
    tracker.votes = True
    slots = [Slot(step - 1, 2, generation(step), 1, 0, 2) for step in (1, 2, 3)]
    for step in (1, 2, 3):
        tracker.hashed(generation(step))
        assert tracker.sending(generation(step))
        if answered or step > 1:
            tracker.replied(None, (1, 2, 3), generation(step))
    tracker.away = True
    tracker.not_delivered(generation(1), may_have_arrived=False)  # a STORED or FAILED vote, if `answered`
    chosen = tracker.choose_slot(slots, tracker.heard(alone=False), generation(4))
    assert chosen == (None if answered else 0)


def test_a_vote_that_may_have_arrived_keeps_its_slot() -> None:
    tracker = GenerationTracker()
    tracker.votes = tracker.away = True
    slots = [Slot(0, 2, generation(1), 1, 0, 2)]
    tracker.hashed(generation(1))
    assert tracker.sending(generation(1))
    tracker.not_delivered(generation(1), may_have_arrived=True)
    tracker.not_delivered(generation(1), may_have_arrived=False)
    assert tracker.choose_slot(slots, tracker.heard(alone=False), generation(2)) is None


def test_a_new_session_owes_nothing_of_the_one_before() -> None:
    """A process that outlives its round keeps the engine: votes and due saves of the old attempt must not follow it.

    The master would refuse them as stale, and would wait for ever for a due generation of the new attempt.
    """
    before = GenerationTracker()
    before.begin(RUN, 1)
    for step in (4, 5):
        before.saved(generation(step))
    before.hashed(generation(4))
    assert before.plan(Cadence(1, 4)).ordered == (generation(4),)
    assert before.plan(Cadence(1, 5), last=generation(5)) == ((), ())
    after = before.next_session()
    after.begin(RUN, 2)
    assert after.pending == (generation(4),), "the keeper still writes it"
    again = Generation(2, 4, RUN)
    after.hashed(again)
    assert after.passed == 5
    after.ended(generation(4), stored=True)
    assert after.plan(Cadence(1, 4)) == ((again,), ())


def test_a_vote_that_counts_is_not_forgotten_in_a_long_outage() -> None:
    """Its slot stays, whatever number of saves follows."""
    tracker = GenerationTracker()
    tracker.begin(RUN, 1)
    tracker.votes = True
    for step in (10, 20):
        tracker.hashed(generation(step))
        assert tracker.sending(generation(step))
        tracker.replied(generation(10), (20,), generation(step))
    tracker.complete_here, tracker.away = generation(10), True
    slots = [Slot(0, 2, generation(10), 1, 0, 2), Slot(1, 2, generation(20), 1, 0, 2), Slot(2, 0)]
    for step in range(30, 400, 10):
        index = tracker.choose_slot(slots, tracker.heard(alone=False), generation(step), last=True)
        assert index == 2
        slots[index] = Slot(index, 2, generation(step), 1, 0, 2)
        tracker.saved(generation(step))
