"""A session in a drill: faults strike once in a run, each step is traced, and the last one ends the loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlrover_hooks import config
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Departure, ShowJob
from dlrover_hooks.session import Session
from dlrover_hooks.testing import InjectedFault
from dlrover_hooks.testing.faults.fault_actions import InjectedFaults
from dlrover_hooks.testing.faults.step_trace import RunTrace
from tests.e2e.session_life import Position


def test_a_stray_last_step_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left in the environment it would end any run as done, with exit code 0."""
    monkeypatch.setenv("DLROVER_HOOKS_LAST_STEP", "8")
    session = Session(config.load({}, job="stray"), config.place({}), checkpoint=False)
    session.join()
    try:
        with pytest.raises(UsageError, match="DLROVER_HOOKS_LAST_STEP=8 would end this run"):
            session.restore_plan()
    finally:
        session.leave(Departure.STOPPED)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The variables of a drill: faults in `faults`, a trace in `trace`, and no step behind the eighth."""
    (tmp_path / "faults").write_text("step=3 at=boundary exception\nstep=5 at=stepped exception\n")
    for name, value in {"FAULTS": tmp_path / "faults", "TRACE": tmp_path / "trace", "LAST_STEP": 8}.items():
        monkeypatch.setenv(f"DLROVER_HOOKS_{name}", str(value))
    return tmp_path


@pytest.fixture
def session(orders: Path) -> Iterator[Session]:
    made = Session(config.load({}, job="drill"), config.place({}), checkpoint=False)
    made.join()
    made.restore_plan()
    yield made
    made.leave(Departure.FAILED)


def train(session: Session, weights: np.ndarray, start: int, source: Position) -> int:
    """Until something ends the loop; the step under way then."""
    session.watch("train", source)
    session.frozen_among(lambda: [weights])
    session.batch_requested(start)
    step = start
    while True:
        step += 1
        weights += step
        session.stepped()
        session.batch_requested(step)
        session.batch_requested(step)  # as an accumulation window does


def test_faults_strike_once_in_a_run(session: Session, orders: Path) -> None:
    """At their moments; what is trained again is not struck again, in this process and, by the file, in others."""
    weights, source = np.zeros(3), Position()
    with pytest.raises(InjectedFault, match="step=3"):
        train(session, weights, 0, source)
    assert source.committed == 3, "at a step boundary the step is over"
    with pytest.raises(InjectedFault, match="step=5"):
        train(session, weights, 2, source)
    assert source.marked == source.committed + 1, "stepped, but not over"
    (file,) = orders.glob("faults.*.struck")
    assert file.name == f"faults.{session.run[:8]}.struck"
    assert [row["number"] for row in InjectedFaults(file).rows()] == [0, 1]
    with pytest.raises(SystemExit):
        train(session, weights, 4, source)


def test_each_step_is_traced_and_the_last_one_ends_the_loop(session: Session, orders: Path) -> None:
    """The job is done with it: a seat that was given up as failed would break the round of the others."""
    weights = np.zeros(3)
    with pytest.raises(InjectedFault):
        train(session, weights, 0, Position())
    with pytest.raises(InjectedFault):
        train(session, weights, 3, Position())
    with pytest.raises(SystemExit) as ended:
        train(session, weights, 5, Position())
    assert ended.value.code == 0
    assert session._caller.call(ShowJob("drill")).finished
    (life,) = RunTrace(orders / "trace").read().lives
    assert [row.step for row in life.rows] == [*range(9)]
    assert len({row.hashes for row in life.rows}) == 9
    assert life.names == ("parameter 0",)
    assert life.rows[2].data == {"train": {"place": 2}}


def test_a_wrong_last_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_HOOKS_LAST_STEP", "many")
    session = Session(config.load({}, job="drill"), config.place({}), checkpoint=False)
    try:
        session.join()
        with pytest.raises(UsageError, match="DLROVER_HOOKS_LAST_STEP='many'"):
            session.restore_plan()
    finally:
        session.leave(Departure.FAILED)


def test_a_session_outside_a_drill_is_left_as_it_is() -> None:
    session = Session(config.load({}, job="drill"), config.place({}), checkpoint=False)
    try:
        session.join()
        session.restore_plan()
        assert not {"stepped", "batch_requested", "finish"} & vars(session).keys()
    finally:
        session.leave(Departure.FAILED)


def test_a_rehearsal_keeps_apart_from_the_job_it_rehearses() -> None:
    """Its checkpoints, its master and its name are never those that the script names."""
    env = {
        "DLROVER_HOOKS_REHEARSAL": "scratch",
        "DLROVER_HOOKS_JOB": "rehearsal-1",
        "DLROVER_HOOKS_MASTER": "http://here",
    }
    given = {"save_to": "s3://real/run", "storage_options": {"anon": True}, "job": "real", "master": "http://real"}
    found = config.load(env, resume="require", **given)
    assert found.save_to is not None
    assert found.save_to.startswith("scratch/saved-")
    assert (found.job, found.master, found.storage_options, found.resume) == ("rehearsal-1", "http://here", {}, "auto")
    assert config.load(env).save_to is None, "what is kept in memory only stays there"
