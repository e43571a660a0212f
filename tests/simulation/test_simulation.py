"""Whole jobs in virtual time, with faults of every kind: each promise holds after every event.

Rounds, leases, votes, the journal, and a master that is killed.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deep import deep
from tests.simulation.mutants import (
    MUTANTS,
    admit_a_second_chief,
    announce_at_once,
    announce_before_the_fence,
    believe_strangers,
    charge_no_exit,
    count_launches_twice,
    count_pauses,
    count_the_stale,
    forget_an_event,
    hear_no_death,
    hide_the_crash,
    keep_leases_short,
    keep_the_done,
    never_roll_back,
    release_at_once,
    restore_a_half,
    tell_of_no_newcomer,
)
from tests.simulation.swarm import FAULTS, INSTEAD
from tests.simulation.world import LEAST, simulate

SEEDS, AT_ONCE = 1000, 50
FIRST = range(1, SEEDS + 1, AT_ONCE)
"""The first ones are for `make test`, the others are deep."""
ROOT = Path(__file__).resolve().parents[2]
RARE: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    announce_at_once: 3645,
    admit_a_second_chief: 3120,
    restore_a_half: 8,
    forget_an_event: 11,
    count_the_stale: 24,
    keep_the_done: 12,
    hear_no_death: 17,
    charge_no_exit: 9,
    hide_the_crash: 10,
    never_roll_back: 190,
    announce_before_the_fence: 100,
    believe_strangers: 41,
    count_launches_twice: 46,
    count_pauses: 45,
    keep_leases_short: 113,
    release_at_once: 30,
    tell_of_no_newcomer: 49,
}
"""Where few seeds notice a mutant: the one to look at first."""
LONG = (restore_a_half,)
"""With these a job goes on for half a minute before the simulation gives it up."""


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """What was imported is none: to look through it behind each seed takes a sixth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("first", [FIRST[0], *map(deep, FIRST[1:])])
def test_seeds(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        result = simulate(seed)
        if result.broken is not None:
            pytest.fail(result.report)
        assert result.events >= LEAST


@pytest.mark.deep
def test_every_fault_happens() -> None:
    """What never happens is not tested."""
    wanted = FAULTS.keys() | {other for other, _ in INSTEAD.values()}
    for seed in range(1, 101):
        wanted -= simulate(seed).faults.keys()
        if not wanted:
            return
    raise AssertionError(f"never happened: {wanted}")


def test_a_seed_replays() -> None:
    """The same again in this process, and in others whose sets and dicts of text are in other orders."""
    seeds = (5, 8, 30, 44)
    here = [simulate(seed) for seed in seeds]
    assert [simulate(seed) for seed in seeds] == here
    code = f"from tests.simulation.world import simulate\nprint([simulate(seed).trace for seed in {seeds}])"
    for number in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=50
        )
        assert done.stdout.strip() == str([result.trace for result in here]), done.stderr


@pytest.mark.parametrize(
    "mutant",
    [deep(mutant) if mutant in LONG else mutant for mutant in MUTANTS],
    ids=lambda mutant: mutant.__name__,
)
def test_a_broken_core_is_noticed(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    """By a promise, with its story: breaking the core on purpose proves the simulation, not the core."""
    for seed in (RARE.get(mutant, 1), *range(1, SEEDS + 1)):
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            result = simulate(seed)
        if result.broken is not None:
            assert "BROKEN" in result.story
            assert result.report.endswith(f"make simulate SEEDS={seed}:{seed}")
            return
    raise AssertionError(f"{mutant.__name__}: nobody noticed")


def test_a_failure_replays() -> None:
    """Its story is the same, line by line."""
    stories: list[str] = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            MUTANTS[0](patch)
            stories.append(next(found.report for seed in range(1, 100) if (found := simulate(seed)).broken))
    assert stories[0] == stories[1]
    assert "BROKEN" in stories[0]
