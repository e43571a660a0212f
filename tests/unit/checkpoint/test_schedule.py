"""When to save and what to make durable: every rank must come to the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_hooks.checkpoint.save.schedule import Durable, Passing, save_due
from dlrover_hooks.protocol import Cadence, Generation

RUN = "0" * 32


def generation(step: int) -> Generation:
    return Generation(1, step, RUN)


def picks(steps: list[int], start: int, heard_after: int) -> list[int]:
    """What a rank persists that hears of `persist_from=start` once it has made `heard_after` of its saves."""
    durable, found = Durable(), []
    for number, step in enumerate([*steps, None]):
        if number >= heard_after and (due := durable.due(Cadence(1, start))) is not None:
            found.append(due.step)
        if step is not None:
            durable.saved(generation(step))
    if (due := durable.due(Cadence(1, start))) is not None:
        found.append(due.step)
    return found


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


@pytest.mark.requirement("DL-90", "EZ-13")
@given(st.integers(1, 100), st.integers(1, 1000))
def test_saves_at_multiples(every: int, step: int) -> None:
    assert save_due(Cadence(every), step) == (step % every == 0)


@pytest.mark.parametrize("begun", [0, 1098, 600_000])
def test_saves_while_no_step_time_is_known_count_from_the_restored_step(begun: int) -> None:
    steps = range(begun - 1, begun + 70)
    due = [step - begun for step in steps if save_due(Cadence(0, begun_step=begun), step)]
    assert due == [1, 2, 4, 8, 16, 32, 64]


def test_a_new_start_is_a_new_question() -> None:
    durable = Durable()
    durable.saved(generation(3))
    assert durable.due(Cadence(1)) is None
    assert durable.due(Cadence(1, 2)) == generation(3)
    assert durable.due(Cadence(1, 2)) is None
    assert durable.due(Cadence(1, 4)) is None
    durable.saved(generation(5))
    assert durable.due(Cadence(1, 4)) == generation(5)


def test_a_late_vote_for_an_old_save_breaks_no_promise_of_a_newer_one() -> None:
    """Its slot was used again before the news of its hash came."""
    passing = Passing()
    for step in (4, 5, 6, 7):
        passing.saved(step)
    passing.voted(4)
    assert passing.step == 5
    for step in (5, 7, 6):
        passing.voted(step)
    assert passing.step == 8
