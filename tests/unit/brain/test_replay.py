"""`dlrover-hooks brain replay`: an algorithm is evaluated on what was recorded of jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlrover_hooks.master.brain.__main__ import command
from dlrover_hooks.master.brain.app import BrainService
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.messages import EndJob, ReportSamples
from dlrover_hooks.master.brain.optimize_processor import OptimizeProcessor
from dlrover_hooks.protocol import JobSample
from tests.brain_jobs import sample, timed, told


def scaled(workers: int) -> JobSample:
    return sample(workers, speed=1 / (0.1 + 0.9 / workers))


@pytest.fixture
def file(tmp_path: Path) -> str:
    """With a job that went from 1 to 2, 4 and 8 workers, and another one that stayed at 1."""
    path = str(tmp_path / "brain.db")
    database = Database(path)
    database.prepare()
    service = BrainService(database, OptimizeProcessor(database))
    for name, workers in (("grown", (1, 2, 4, 8)), ("small", (1,))):
        service.register(told(name, script_hash="abc", global_batch=256))
        service.report(ReportSamples(name, timed(*(scaled(n) for n in workers for _ in range(3)))))
        service.end(EndJob(name))
    database.close()
    return path


@pytest.mark.requirement("DL-37")
def test_a_replay_compares_plans_with_what_happened(file: str) -> None:
    done = CliRunner().invoke(command, ["replay", "--database", file, "--job", "grown", "--json"])
    assert done.exit_code == 0, done.output
    plans = [json.loads(line) for line in done.output.splitlines()]
    assert [(plan["after"], plan["real"], plan.get("next")) for plan in plans] == [
        (3, [0, 1], [0, 2]), (6, [0, 2], [0, 4]), (9, [0, 4], [0, 8]), (12, [0, 8], None),
    ]  # fmt: skip
    assert [plan["planned"] for plan in plans[:3]] == [[0, 2], [0, 4], [0, 8]], "it knew no more than the job then"
    third = plans[2]
    assert third["planned_speed"] == pytest.approx(1 / (0.1 + 0.9 / 8))
    assert third["predicted"] == pytest.approx(third["planned_speed"], rel=0.3)


def test_the_table_has_a_line_for_each_decision_and_a_summary(file: str) -> None:
    done = CliRunner().invoke(command, ["replay", "--database", file])
    lines = done.output.splitlines()
    assert lines[0].split()[:3] == ["job", "samples", "real"]
    assert [line.split()[0] for line in lines[1:-1]] == ["grown"] * 4 + ["small"]
    assert "5 decisions, 0 failed; median error of the predictions" in lines[-1]


def test_other_algorithms_and_wrong_names(file: str) -> None:
    done = CliRunner().invoke(command, ["replay", "--database", file, "--algorithm", "first_plan"])
    assert done.exit_code == 0
    assert "a share of its limits" in done.output
    for arguments, said in (
        (["--algorithm", "magic"], "no algorithm 'magic'"),
        (["--job", "nobody"], "no job 'nobody'"),
        (["--config", "5"], "no JSON object"),
    ):
        done = CliRunner().invoke(command, ["replay", "--database", file, *arguments])
        assert done.exit_code == 78
        assert said in done.output
