"""Schedules of faults: their file, when they are due, and chance that comes again (fault kit)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.testing.faults import fault_plan
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind, Moment, Target

TEXT = """
# comment
step=20 rank=1 kill
step=30 at=boundary stop seconds=3   # for three seconds
step=40 kill of=master
"""


def test_a_file_is_read_and_written() -> None:
    found = fault_plan.parse(TEXT)
    assert found == (
        Fault(step=20, rank=1, kind=Kind.KILL),
        Fault(step=30, kind=Kind.STOP, at=Moment.BOUNDARY, seconds=3.0),
        Fault(step=40, kind=Kind.KILL, of=Target.MASTER),
    )
    assert fault_plan.parse(fault_plan.written(found, "again")) == found


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("step=20 kil", "Invalid enum value 'kil'"),
        ("kill rank=1", "missing required field `step`"),
        ("step=soon kill", "Expected `int`"),
        ("step=3 kill who=1", "unknown field `who`"),
        ("step=3 kill stop", "one word"),
        ("step=0 kill", "count from 1"),
        ("step=3 hang of=keeper", "of=keeper"),
    ],
)
def test_a_line_that_means_nothing_is_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text(f"step=1 kill\n{line}\n")
    with pytest.raises(UsageError, match=r"faults\.txt:2") as refused:
        fault_plan.read(path)
    assert why in refused.value.message
    assert "step=20 rank=1 kill" in refused.value.hint


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.txt cannot be read"):
        fault_plan.read(tmp_path / "nowhere.txt")


def test_each_strikes_its_rank_at_its_moment_and_later_where_that_did_not_come() -> None:
    plan = fault_plan.parse("step=5 rank=1 kill\nstep=5 rank=1 at=boundary stop\nstep=7 rank=0 at=forward hang")
    assert fault_plan.due(plan, 5, 1, Moment.FORWARD, ()) == []
    assert fault_plan.due(plan, 5, 1, Moment.BACKWARD, ()) == [0]
    assert fault_plan.due(plan, 5, 0, Moment.BOUNDARY, ()) == []
    assert fault_plan.due(plan, 5, 1, Moment.BOUNDARY, ()) == [0, 1], "there was no backward"
    assert fault_plan.due(plan, 5, 1, Moment.BOUNDARY, {0, 1}) == []
    assert fault_plan.due(plan, 9, 0, Moment.FORWARD, ()) == [2], "rolled forward over it"


def test_chance_is_the_seeds_in_every_process() -> None:
    """Whatever the hash seed of the process: a failed run is repeated by its number."""
    code = (
        "from dlrover_hooks.testing.faults.fault_plan import random, written\n"
        "print(written(random(5, steps=90, world=4)), end='')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    here = fault_plan.random(5, steps=90, world=4)
    assert told == fault_plan.written(here)
    assert {(fault.kind, fault.of) for fault in here} == set(fault_plan.MENU)
    assert here != fault_plan.random(6, steps=90, world=4)


@pytest.mark.parametrize("seed", range(50))
def test_random_faults_fit_into_the_run(seed: int) -> None:
    plan = fault_plan.random(seed, steps=40, world=3, count=7)
    assert [fault.step for fault in plan] == sorted(fault.step for fault in plan)
    assert all(3 <= fault.step < 40 and fault.rank < 3 for fault in plan)
    assert len(plan) == 7


def test_too_many_faults_are_refused() -> None:
    with pytest.raises(UsageError, match="10 faults in 12 steps"):
        fault_plan.random(1, steps=12, world=2)
