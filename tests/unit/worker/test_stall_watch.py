"""A rank that makes no more steps, by virtual time."""

from __future__ import annotations

import pytest

from dlrover_hooks.worker.stall_watch import BUSY_FACTOR, FACTOR, FLOOR_S, LONGEST_LOOK_S, StallWatch


class Clock:
    """Looks once a second of virtual time."""

    def __init__(self, watch: StallWatch) -> None:
        self.watch, self.now, self.step = watch, 1000.0, 0
        watch.look(0, self.now)

    def pass_s(self, seconds: float) -> float | None:
        """The time after which it first stalls; None: it does not."""
        for passed in range(1, int(seconds) + 1):
            self.now += 1.0
            if self.watch.look(self.step, self.now):
                return passed
        return None

    def steps(self, *pauses_s: float) -> None:
        for pause_s in pauses_s:
            assert self.pass_s(pause_s) is None
            self.step += 1
            self.now += 0.5
            assert not self.watch.look(self.step, self.now)


@pytest.mark.parametrize("limit_s", [None, 5.0])
def test_the_first_step_may_take_any_time(limit_s: float | None) -> None:
    clock = Clock(StallWatch(limit_s))
    assert clock.pass_s(100_000) is None
    clock.steps(0)
    assert clock.watch.longest_s == 0.0, "imports and compilation say nothing about later steps"


def test_a_limit_is_learned_from_the_longest_pause() -> None:
    clock = Clock(StallWatch())
    clock.steps(500, 1, 40)
    assert clock.pass_s(1000) is None, "two pauses are not enough"
    clock = Clock(StallWatch())
    clock.steps(500, 1, 40, 1)
    limit_s = FACTOR * 40.5
    assert clock.watch.limit_s == limit_s
    assert clock.pass_s(1000) == int(limit_s) + 1


def test_quick_steps_have_a_minute() -> None:
    clock = Clock(StallWatch())
    clock.steps(*[0] * 20)
    assert clock.pass_s(1000) == FLOOR_S + 1


def test_a_stall_that_ended_is_learned() -> None:
    """An evaluation that takes longer than the limit is reported the first time only."""
    clock = Clock(StallWatch())
    clock.steps(*[0] * 20)
    assert clock.pass_s(300) == FLOOR_S + 1
    for _ in range(300 - int(FLOOR_S) - 1):
        assert clock.pass_s(1) == 1, "it still stalls"
    clock.step += 1
    assert not clock.watch.look(clock.step, clock.now)
    assert clock.pass_s(2000) == FACTOR * 300 + 1


def test_a_given_limit_counts_from_the_first_step_on() -> None:
    clock = Clock(StallWatch(5.0))
    clock.steps(30)
    assert clock.pass_s(100) == 6
    clock = Clock(StallWatch(float("inf")))
    clock.steps(*[0] * 20)
    assert clock.pass_s(100_000) is None


def test_a_process_that_was_stopped_does_not_stall() -> None:
    clock = Clock(StallWatch(60.0))
    clock.steps(1, 1)
    clock.now += 3600.0
    assert not clock.watch.look(clock.step, clock.now)
    assert clock.watch.idle_s == LONGEST_LOOK_S


def test_a_resumed_run_has_made_no_step_yet() -> None:
    clock = Clock(StallWatch(5.0, begin=100))
    clock.step = 100  # the first request for a batch
    assert clock.pass_s(1000) is None
    clock.steps(0)
    assert clock.pass_s(100) == 6


def test_an_active_rank_is_busy_up_to_ten_times_the_learned_limit() -> None:
    clock = Clock(StallWatch())
    clock.steps(*[0] * 20)
    busy = []
    for _ in range(700):
        clock.now += 1.0
        clock.watch.look(clock.step, clock.now, active=True)
        busy.append(clock.watch.busy)
    assert busy == [True] * int(BUSY_FACTOR * FLOOR_S) + [False] * 100


def test_a_rank_is_not_busy_long_after_its_last_activity() -> None:
    clock = Clock(StallWatch())
    clock.steps(*[0] * 20)
    for second in range(100):
        clock.now += 1.0
        clock.watch.look(clock.step, clock.now, active=second < 70)
    assert not clock.watch.busy
    clock = Clock(StallWatch(5.0))
    clock.steps(0)
    clock.now += 1.0
    clock.watch.look(clock.step, clock.now, active=True)
    assert not clock.watch.busy, "the user has said how long a step may take"
