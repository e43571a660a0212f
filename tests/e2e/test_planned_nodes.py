"""`dlrover-hooks run --mode`: the master plans the nodes of a job, which are agents on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.descendants import descendants
from tests.e2e.brain_process import BrainProcess
from tests.e2e.launched import REPOSITORY, Launched, all_gone
from tests.e2e.planned_script import EPOCHS, SAMPLES, TRAIN, environment, wrong_steps
from tests.waiting import until

Launch = Callable[..., Launched]

HERE = """
attach()
watch = client.watch(conf.job, lambda said: None, lambda said: None)
begun()
note(node=os.environ["DLROVER_HOOKS_NODE"], world=int(os.environ["WORLD_SIZE"]))
"""
STAY = HERE + "threading.Event().wait(600)\n"
"""A member of the round that makes no steps. Its agent restarts it when the round changes."""


def hooks(launched: Launched, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of dlrover-hooks about this job."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(launched.temporary)}
    command = [sys.executable, "-m", "dlrover_hooks", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def plans(launched: Launched) -> dict[str, Any]:
    found = hooks(launched, "plans", launched.job, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def agents(launched: Launched) -> dict[str, psutil.Process]:
    """The processes of the nodes, by name."""
    found: dict[str, psutil.Process] = {}
    for one in descendants(launched.process.pid, "agent_process", children_only=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found[one.environ()["DLROVER_HOOKS_NODE"]] = one
    return found


def lives(launched: Launched, count: int) -> list[dict[str, Any]]:
    return launched.wait_for(lambda found: len(found) == count)


@pytest.mark.deep
@pytest.mark.requirement("SC-1", "DL-29", "DL-30")
def test_a_plan_that_slows_the_job_down_is_taken_back_and_no_sample_is_lost_or_repeated(
    launch: Launch, tmp_path: Path
) -> None:
    """One node, two, and one again, while the job trains: each step once, with the samples of its global batch."""
    flags = ("--mode", "single-job", "--max-workers", "2", "--plan-window", "2s", "--max-cpu", "8")
    job = launch(TRAIN, *flags, **environment(tmp_path))
    job.says("plan 3 is rolled back", 400.0)
    job.says("others are preempted", 120.0)
    (tmp_path / "hurry").touch()
    code, said = job.end(300.0)
    assert code == 0, said
    assert "declared this process dead" not in said, "it leaves as planned"
    rows = job.read()
    assert {row["world"] for row in rows} == {1, 2}
    assert wrong_steps(rows) == []
    for epoch in range(EPOCHS):
        ids = Counter(index for row in rows if row["epoch"] == epoch for index in row["ids"])
        assert len(ids) == SAMPLES
        assert set(ids.values()) == {1}
    assert job.leftovers() == []


@pytest.mark.deep
@pytest.mark.requirement("DL-28")
def test_the_user_changes_the_number_of_nodes(launch: Launch) -> None:
    """Manual mode: nodes are added and removed while the first one stays."""
    job = launch(STAY, "--mode", "manual", "--max-workers", "3", member=True)
    lives(job, 1)
    first = agents(job)["worker-0"].pid
    done = hooks(job, "scale", "--job", job.job, "--workers", "3")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [[f"worker-{n}", "running"] for n in range(3)]
    until(lambda: {row["world"] for row in job.read()[-3:]} == {3}, "a world of three", diagnostic=job.read)
    assert hooks(job, "scale", "--job", job.job, "--workers", "1").returncode == 0
    until(lambda: list(agents(job)) == ["worker-0"], "one node", diagnostic=lambda: agents(job))
    assert agents(job)["worker-0"].pid == first
    found = plans(job)
    assert [plan["what"] for plan in found["plans"]][1:] == ["worker 1 -> 3", "worker 3 -> 1"]
    assert found["held"]
    refused = hooks(job, "scale", "--job", job.job, "--workers", "4")
    assert refused.returncode == 1
    assert "may have 1 to 3 workers, not 4" in refused.stderr
    assert hooks(job, "scale", "--job", job.job, "--ps", "2").returncode == 78
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 130, said
    assert job.leftovers() == []


@pytest.mark.deep
def test_a_node_that_is_killed_is_replaced(launch: Launch) -> None:
    job = launch(STAY, "--mode", "manual", "--max-workers", "2", "--min-workers", "2", member=True)
    lives(job, 2)
    agents(job)["worker-1"].kill()
    job.says("worker-1 ended (killed)")
    until(lambda: sorted(agents(job)) == ["worker-0", "worker-2"], "another node", diagnostic=lambda: agents(job))
    both = {"worker-0", "worker-2"}
    until(lambda: {row["node"] for row in job.read()[-2:]} == both, "a round with it", diagnostic=lambda: job._said)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130


@pytest.mark.deep
def test_an_error_of_the_script_ends_the_job_with_its_traceback(launch: Launch) -> None:
    job = launch("raise ValueError('no such column')\n", "--mode", "manual", "--max-workers", "2")
    code, said = job.end()
    assert code == 1, said
    assert "ValueError: no such column" in said
    assert "worker-0 ended with exit code 1" in said
    assert job.leftovers() == []


def test_nodes_end_with_a_launcher_that_is_killed(launch: Launch) -> None:
    job = launch(STAY, "--mode", "manual", "--max-workers", "2", "--min-workers", "2", member=True)
    lives(job, 2)
    pids = [one.pid for one in psutil.Process(job.process.pid).children(recursive=True)]
    job.process.kill()
    assert all_gone(pids)


@pytest.mark.deep
def test_a_master_that_is_killed_keeps_the_plans(launch: Launch) -> None:
    """It is started again with its journal: nodes stay, and the user's plan holds."""
    job = launch(STAY, "--mode", "manual", "--max-workers", "2", member=True)
    lives(job, 1)
    job.says("the number of nodes changes only by dlrover-hooks scale")
    assert hooks(job, "scale", "--job", job.job, "--workers", "2").returncode == 0
    before = {name: one.pid for name, one in agents(job).items()}
    master = job.child("dlrover_hooks.master")
    master.kill()
    job.child("dlrover_hooks.master", other_than=master.pid)
    found = until(lambda: plans(job), "the plans of the new master")
    assert [plan["what"] for plan in found["plans"]][1:] == ["worker 1 -> 2"]
    assert found["held"]
    assert {name: one.pid for name, one in agents(job).items()} == before
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143
    assert job.leftovers() == []


@pytest.fixture
def brain(tmp_path: Path) -> Iterator[BrainProcess]:
    process = BrainProcess(tmp_path, f"sqlite:///{tmp_path}/brain.db")
    yield process
    process.close()


@pytest.mark.deep
@pytest.mark.requirement("DL-34", "DL-38")
def test_in_cluster_mode_the_brain_makes_the_plans(launch: Launch, brain: BrainProcess) -> None:
    job = launch(STAY, "--mode", "cluster", "--brain", brain.url, "--max-workers", "2", member=True)
    lives(job, 1)
    (first,) = plans(job)["plans"]
    assert first["reason"].startswith("the Brain (")
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert job.leftovers() == []


@pytest.mark.deep
@pytest.mark.requirement("DL-39")
def test_a_brain_that_is_away_and_a_master_that_is_killed_do_not_stop_the_job(
    launch: Launch, brain: BrainProcess
) -> None:
    """The master says that it plans by itself. A new master goes on with the nodes of the old one."""
    brain.kill()
    job = launch(STAY, "--mode", "cluster", "--brain", brain.url, "--max-workers", "2", member=True)
    job.says("The master plans from the job's own statistics meanwhile")
    lives(job, 1)
    before = {name: one.pid for name, one in agents(job).items()}
    master = job.child("dlrover_hooks.master")
    master.kill()
    job.child("dlrover_hooks.master", other_than=master.pid)
    assert until(lambda: plans(job), "the plans of the new master")["mode"] == "cluster"
    assert {name: one.pid for name, one in agents(job).items()} == before
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mode", "manual", "--nnodes", "2"), "the master plans how many nodes there are"),
        (("--mode", "manual", "--ps", "1", "--workers", "2"), "the master plans how many workers there are"),
        (("--mode", "manual", "--max-ps", "2"), "--max-ps is for jobs with parameter servers"),
        (("--mode", "manual", "--ps", "3", "--max-ps", "2"), "min_ps 3, max_ps 2"),
        (("--mode", "manual", "--min-workers", "3", "--max-workers", "2"), "min_workers 3, max_workers 2"),
        (("--mode", "manual", "--max-cpu", "1", "--min-workers", "4"), "too little for 4 workers"),
        (("--mode", "cluster"), "--mode cluster and --brain need each other"),
        (("--max-workers", "2"), "--max-workers is for jobs whose nodes are planned"),
        (("--mode", "manual", "--fault-level", "hot"), "does not work with --fault-level"),
    ],
)
def test_what_is_refused(launch: Launch, flags: tuple[str, ...], said: str) -> None:
    code, errors = launch(STAY, *flags, member=True).end()
    assert code == 78
    assert said in errors
