"""Algorithms run bounded: one that raises, hangs, dies or breaks a rule gives no plan, and the reason is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sqlalchemy as sa

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.brain.algorithm_executor import AlgorithmExecutor, available, check_name
from dlrover_hooks.master.brain.algorithms.registry import PlanProblem
from dlrover_hooks.master.brain.app import BrainService
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.tables import optimize_event
from dlrover_hooks.master.brain.messages import AskPlan
from dlrover_hooks.master.brain.optimize_processor import OptimizeProcessor
from dlrover_hooks.master.brain.records import AlgorithmInput, JobRecord
from dlrover_hooks.master.scaling import OptimizeStage
from tests.brain_jobs import sample, told
from tests.descendants import descendants
from tests.e2e.brain_process import plug_in

GIVEN = AlgorithmInput(JobRecord(told(), OptimizeStage.RUNNING, (sample(2),)), config={"workers": 3})
PLAN = (
    'return Proposal(ResourcePlan({"worker": NodeGroupResource(config["workers"], NodeResource(2, 2048))}), "why", 7.0)'
)
BODIES = {
    "good": PLAN,
    "silent": "return None",
    "raising": 'raise RuntimeError("out of ideas")',
    "hanging": "import time\nwhile True: time.perf_counter()",
    "dying": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "leaving": "raise SystemExit(0)",
    "lying": "return 5",
    "negative": 'return Proposal(ResourcePlan({"worker": NodeGroupResource(-1)}), "")',
    "greedy": 'return Proposal(ResourcePlan({"worker": NodeGroupResource(99)}), "")',
    "confused": 'return Proposal(ResourcePlan(node_resources={"worker-9": NodeResource(2)}), "")',
    "strange": 'return Proposal(ResourcePlan({"wizard": NodeGroupResource(1)}), "")',
}


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plug-ins"
    for name, body in BODIES.items():
        plug_in(folder, name, body)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path.cwd()}")
    return folder


@pytest.mark.requirement("DL-96")
def test_a_plug_in_answers_like_an_algorithm_of_ours(plug_ins: Path) -> None:
    executed = AlgorithmExecutor().execute("good", GIVEN)
    assert executed.error == ""
    assert executed.proposal is not None
    assert executed.proposal.plan.node_group_resources["worker"].count == 3
    assert executed.proposal.predicted == 7.0
    assert available()["good"] == "plug_in_good:algorithm"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("silent", ""),
        ("raising", "out of ideas"),
        ("hanging", "no answer within 3 s"),
        ("dying", "SIGSEGV"),
        ("leaving", "malformed"),
        ("lying", "it returned int"),
        ("negative", "count is -1"),
        ("greedy", "plans 99 nodes of type worker, the job may have 32"),
        ("confused", "unknown node worker-9"),
        ("strange", "unknown type of node wizard"),
    ],
)
def test_a_bad_plug_in_gives_no_plan_and_says_why(plug_ins: Path, name: str, error: str) -> None:
    executed = AlgorithmExecutor(3.0 if name == "hanging" else 60.0).execute(name, GIVEN)
    assert executed.proposal is None
    assert error in executed.error
    assert bool(error) == bool(executed.error)


def test_a_plug_in_that_hangs_is_ended(plug_ins: Path) -> None:
    assert AlgorithmExecutor(1.5).execute("hanging", GIVEN).proposal is None
    assert descendants(os.getpid(), "hanging") == []


def test_a_plug_in_does_not_see_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(tmp_path / "p", "curious", 'import os\nraise ValueError([k for k in os.environ if "TOKEN" in k])')
    monkeypatch.syspath_prepend(str(tmp_path / "p"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'p'}:{Path.cwd()}")
    monkeypatch.setenv("DLROVER_HOOKS_TOKEN", "secret")
    assert "ValueError: []" in AlgorithmExecutor().execute("curious", GIVEN).error


@pytest.mark.parametrize("name", ["raising", "silent", "negative"])
def test_the_default_answers_instead_of_a_plug_in(plug_ins: Path, tmp_path: Path, name: str) -> None:
    database = Database(str(tmp_path / "brain.db"))
    database.prepare()
    service = BrainService(database, OptimizeProcessor(database, use={PlanProblem.CREATION: name}))
    service.register(told())
    answer = service.plan(AskPlan("job", OptimizeStage.CREATE))
    assert (answer.algorithm, answer.number) == ("first_plan", 1)
    with database.reading() as connection:
        (error,) = connection.execute(sa.select(optimize_event.c.error)).scalars()
    assert bool(error) == (name != "silent")
    assert name in error or name == "silent"
    database.close()


def test_an_algorithm_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match=r"no algorithm 'magic'(.|\n)*plan_from_history"):
        check_name("magic")
