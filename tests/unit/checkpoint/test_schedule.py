"""When to save: every rank must come to the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.checkpoint.save.schedule import save_due
from dlrover_hooks.protocol import Cadence


@pytest.mark.requirement("DL-90", "EZ-13")
@given(st.integers(1, 100), st.integers(1, 1000))
def test_saves_at_multiples(every: int, step: int) -> None:
    assert save_due(Cadence(every), step) == (step % every == 0)


@pytest.mark.parametrize("begun", [0, 1098, 600_000])
def test_saves_while_no_step_time_is_known_count_from_the_restored_step(begun: int) -> None:
    steps = range(begun, begun + 70)
    due = [step - begun for step in steps if save_due(Cadence(0, begun_step=begun), step)]
    assert due == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(("every", "due"), [(0, [11, 12, 13, 14]), (4, [12])])
def test_a_loop_before_the_restored_step_saves(every: int, due: list[int]) -> None:
    assert [step for step in range(11, 15) if save_due(Cadence(every, begun_step=600_000), step)] == due
