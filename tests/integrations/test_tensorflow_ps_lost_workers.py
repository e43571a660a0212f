"""Workers and the chief of a job with parameter servers under TensorFlow: killed, stopped, without progress.

Each shard leaves a mark in the model, so a shard that is lost or applied twice is seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_hooks.ps.shard_order import ShardOrder
from tests.integrations.ps_job import (
    SHARDS,
    SINCE,
    WATCHDOG_S,
    StartPS,
    emptied,
    no_worker_was_replaced,
    trained_once,
)

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(280)]


def shard_of_step(step: int) -> int:
    """Number of the shard that this step is made with, by its place in the data."""
    order = ShardOrder(2 * SHARDS, 2)
    shards = [order.take() for _ in range(step)]
    assert shards[-1] is not None
    return shards[-1].begin // 2


@pytest.mark.requirement("DL-92")
@pytest.mark.parametrize("workers", [2, 1])
def test_a_killed_worker_costs_no_shard(start_ps: StartPS, workers: int) -> None:
    """TensorFlow gives its steps to the other one, or to the replacement, which takes its address: at least once."""
    job = start_ps(workers=workers, holds=[100])
    job.row("holds", 100)
    killed = f"worker {workers - 1}"
    job.kill(killed)
    job.says(rf"\] {killed}: pid", 2)
    job.release(100)
    job.end()
    seen = job.row("seen")["seen"]
    assert min(seen) == 1
    assert sum(seen) <= SHARDS + 1  # one step ran on that worker
    assert SHARDS <= job.row("done")["applied"] <= SHARDS + 1


def test_a_worker_whose_calls_fail_is_replaced(start_ps: StartPS, tmp_path: Path) -> None:
    """TensorFlow takes some errors of a connection for errors of the step. So the chief reports the worker."""
    gate = tmp_path / "gate"
    gate.write_text("not empty")
    job = start_ps(hangs_at=shard_of_step(121), gate=str(gate))
    job.says(r"worker \d failed: the chief cannot reach it: .*; it is replaced")
    gate.write_text("")
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}


@pytest.mark.requirement("ED-71")
def test_workers_that_complete_no_step_are_replaced(start_ps: StartPS, pipe: Path) -> None:
    """They send heartbeats, and a new chief would wait for them as well. The steps since the checkpoint are redone."""
    job = start_ps(ps=2, hangs_at=shard_of_step(121), gate=str(pipe), watchdog_s=WATCHDOG_S)
    job.says("no step was completed for .*: the workers are replaced")
    emptied(pipe)  # before a replacement can begin the step
    job.says(r"worker \d failed: .*no step was completed.*; it is replaced")
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}


def test_a_worker_whose_step_never_ends_does_not_hold_up_the_loss_of_a_parameter_server(
    start_ps: StartPS, pipe: Path
) -> None:
    """The step occupies a thread of its worker, which must still have enough threads for the next cluster.

    Without a standby the replacement server starts late, and no worker may be blamed for that.
    """
    plan = {"hangs_at": shard_of_step(121), "gate": str(pipe), "inflight": 400, "watchdog_s": 200.0}
    job = start_ps("--standby", "0", ps=2, **plan)
    job.row("step", 120)
    old = job.kill("ps 1")
    job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    emptied(pipe)
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}
    no_worker_was_replaced(job)


def test_a_killed_chief_resumes_from_the_checkpoint(start_ps: StartPS) -> None:
    job = start_ps(holds=[120])
    job.row("holds", 120)
    old = job.kill("chief")
    job.says(r"\] chief: pid", 2)
    job.release(120)
    job.end()
    trained_once(job)
    new = job.pid("chief")
    assert [row["step"] for row in job.rows if row["pid"] == old and "step" in row] == list(range(1, 121))
    assert 121 - SINCE <= next(row["step"] for row in job.rows if row["pid"] == new and "step" in row) <= 121


def test_chief_and_parameter_server_killed_at_once(start_ps: StartPS) -> None:
    job = start_ps(ps=2, holds=[120])
    job.row("holds", 120)
    job.kill("ps 0")
    job.kill("chief")
    job.release(120)
    job.end()
    trained_once(job)


def test_a_chief_that_has_reconnected_too_often_is_started_anew(start_ps: StartPS) -> None:
    """TensorFlow leaks memory and threads with each reconnect. The restart is not charged to the budget."""
    job = start_ps("--max-restarts", "0", holds=[100, 200], max_reconnects=1)
    for step, count in ((100, "2"), (200, "1")):
        job.row("holds", step)
        job.scale("--ps", count, "--no-wait")
        job.release(step)
    job.end()
    trained_once(job)
    assert len({row["pid"] for row in job.rows}) > 1
