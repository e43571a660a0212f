"""`auto` takes the mode whose steps are shorter, tells why, and does not waver."""

from __future__ import annotations

import random

import pytest

from dlrover_hooks.checkpoint.save.overlap_policy import AUTO, EAGER, LAZY, MOST_PAIRS, PAIRS, RETRY, WARM_UP, Mode


def train(mode: Mode, saves: int, times: dict[str, float], noise: float = 0.0, seed: int = 0) -> list[str]:
    """The lines said over so many saves, each of them followed by a step that takes `times[way]`, more or less."""
    chance = random.Random(seed)
    lines = (mode.took(times[mode.next()] * (1 + noise * chance.random())) for _ in range(saves))
    return [line for line in lines if line is not None]


def test_begins_eager_and_takes_what_is_faster() -> None:
    mode = Mode()
    assert [mode.next() for _ in range(WARM_UP)] == [EAGER] * WARM_UP
    said = train(mode, 2 * PAIRS + 2, {EAGER: 0.110, LAZY: 0.101})
    assert mode.chosen == LAZY
    assert said == [
        "saves are lazy: a step with such a save took 101.00 ms, and 110.00 ms with an eager one "
        f"(median of {PAIRS} pairs)"
    ]
    assert mode.next() == LAZY


def test_stays_eager_where_lazy_gains_nothing() -> None:
    mode = Mode()
    said = train(mode, WARM_UP + 2 * MOST_PAIRS + 2, {EAGER: 0.1, LAZY: 0.1}, noise=0.2)
    assert mode.chosen == EAGER
    assert len(said) == 1


def test_no_choice_is_said_to_be_the_slower_one() -> None:
    """Where nothing is clear, eager stays: the line says so instead of "saves are eager: lazy was faster"."""
    mode = Mode()
    mode._pairs = [(0.1, 0.1 - 0.0001 * (-1) ** number) for number in range(MOST_PAIRS - 1)]
    said = train(mode, WARM_UP + 2, {EAGER: 0.1, LAZY: 0.0999})
    assert said == [
        "saves are eager: a step with such a save took 100.00 ms, which is not clearly longer than 99.90 ms "
        f"with a lazy one (median of {MOST_PAIRS} pairs)"
    ]


@pytest.mark.parametrize("seed", range(20))
def test_never_takes_the_slower_one(seed: int) -> None:
    """A tenth slower, under noise of a third: 20 trials without one mistake."""
    mode = Mode()
    train(mode, WARM_UP + 2 * MOST_PAIRS + 2, {EAGER: 0.1, LAZY: 0.11}, noise=0.33, seed=seed)
    assert mode.chosen == EAGER


def test_both_ways_are_tried_equally_often_in_turn() -> None:
    mode = Mode()
    train(mode, WARM_UP, {EAGER: 1.0, LAZY: 1.0})
    assert [mode.next() for _ in range(8)] == [EAGER, LAZY, LAZY, EAGER] * 2


def test_a_choice_changes_only_for_a_clear_gain() -> None:
    """Hysteresis: half a percent does not, a fifth does; and only after RETRY saves."""
    mode = Mode()
    train(mode, WARM_UP + 2 * PAIRS, {EAGER: 0.110, LAZY: 0.100})
    assert mode.chosen == LAZY
    assert train(mode, RETRY - 1, {EAGER: 0.1, LAZY: 0.2}) == []
    assert len(train(mode, 2 * MOST_PAIRS + 4, {EAGER: 0.1, LAZY: 0.1005})) == 1
    assert mode.chosen == LAZY
    train(mode, RETRY + 2 * MOST_PAIRS + 4, {EAGER: 0.1, LAZY: 0.12})
    assert mode.chosen == EAGER


def test_a_wish_is_kept_and_forbidding_wins() -> None:
    assert {Mode(EAGER).next(), *(Mode(EAGER).next() for _ in range(3))} == {EAGER}
    mode = Mode(LAZY)
    assert mode.next() == LAZY
    assert train(mode, 3 * PAIRS, {LAZY: 1.0}) == []
    assert mode.forbid("reason") == "saves are eager from here on: reason"
    assert mode.forbid("reason") is None
    assert mode.next() == EAGER


def test_forbidden_within_a_trial() -> None:
    mode = Mode(AUTO)
    train(mode, WARM_UP + 3, {EAGER: 1.0, LAZY: 0.5})
    mode.forbid("reason")
    assert train(mode, 2 * RETRY, {EAGER: 1.0}) == []
    assert mode.next() == EAGER
