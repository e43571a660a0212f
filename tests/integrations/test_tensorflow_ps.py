"""Parameter servers under TensorFlow, with real processes: scaled, migrated, killed, stopped, never ready.

Each shard leaves a mark in the model, so a shard that is lost or applied twice is seen.
"""

from __future__ import annotations

import signal

import pytest

from tests.integrations.ps_job import SHARDS, SINCE, StartPS, no_worker_was_replaced, trained_once

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.mark.requirement("DL-74", "DL-76", "EZ-8", "EZ-10")
def test_scaled_up_down_and_migrated_no_shard_is_lost_or_repeated(start_ps: StartPS) -> None:
    """1 to 3 parameter servers, one migrated, down to 1; workers 2 to 3 to 1; the chief's process stays."""
    job = start_ps(holds=[50, 150, 250, 350])
    job.row("holds", 50)
    changes = {
        50: ("--ps", "3"),
        150: ("--migrate", "ps:1"),
        250: ("--ps", "1", "--workers", "3"),
        350: ("--workers", "1"),
    }
    for step, change in changes.items():
        job.row("holds", step)
        job.scale(*change, "--no-wait")
        job.release(step)
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}
    assert len(job.row("done")["versions"]) >= 4
    assert job.steps() == list(range(1, SHARDS + 1))
    assert job.left() == []


@pytest.mark.requirement("DL-90", "DL-91", "ED-65", "EZ-13", "EZ-14")
def test_a_killed_parameter_server_costs_the_steps_since_the_checkpoint(start_ps: StartPS) -> None:
    """They are trained again, into the model that was restored: each shard is in it once."""
    job = start_ps(ps=2, holds=[130])
    job.row("holds", 130)
    chief, old = job.pid("chief"), job.kill("ps 1")
    job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    job.release(130)
    job.end()
    trained_once(job)
    steps = job.steps()
    back = next(at for at in range(1, len(steps)) if steps[at] <= steps[at - 1])
    assert 131 - SINCE <= steps[back] <= 131
    assert {row["pid"] for row in job.rows} == {chief}


def test_parameter_servers_that_are_killed_in_the_middle_of_steps(start_ps: StartPS) -> None:
    """Three times: what the model has of steps that were cut off is rolled back, and the workers go on."""
    job = start_ps(ps=2, inflight=64)
    for step in (100, 250, 400):
        job.row("step", step)
        old = job.kill("ps 1")
        job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    job.end()
    trained_once(job)
    no_worker_was_replaced(job)


def test_a_parameter_server_that_is_killed_while_the_model_is_exported(start_ps: StartPS) -> None:
    """`on_end` is called again, with the model on the replacement."""
    job = start_ps(ps=2, holds_end=True)
    job.row("ends")
    old = job.kill("ps 1")
    job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    job.release("end")
    job.end()
    trained_once(job)


def test_a_stopped_parameter_server_is_fenced_and_replaced(start_ps: StartPS) -> None:
    """SIGSTOP: its sockets stay open, so nothing fails by itself. Its lease ends, the launcher kills it."""
    job = start_ps("--hang-timeout", "3s", ps=2, holds=[120])
    job.row("holds", 120)
    job.kill("ps 0", signal.SIGSTOP)
    job.release(120)
    job.says("ps 0 failed: .*; it is replaced")
    job.end()
    trained_once(job)


def test_a_finished_job_says_so(start_ps: StartPS) -> None:
    first = start_ps(folder="same")
    first.end()
    second = start_ps(folder="same")
    second.end()
    assert [row["done"] for row in second.rows if "done" in row] == [SHARDS, SHARDS]
    assert len(second.steps()) == SHARDS


def test_a_parameter_server_that_is_never_ready_is_rolled_back(start_ps: StartPS) -> None:
    """The new server is stopped before it registers: the job goes on with the old set, and `scale` says why."""
    job = start_ps("--standby", "0", holds=[100])
    job.row("holds", 100)
    with job.scaling("--ps", "2", "--timeout", "4") as scaling:
        job.says(r"\] ps 1: pid")
        job.kill("ps 1", signal.SIGSTOP)
        job.says("ps:1 did not register within 4 s")
        job.release(100)
        said = scaling.communicate(timeout=60)[0]
    assert scaling.returncode == 1, said
    assert "ps:1 did not register within 4 s" in said
    job.end()
    trained_once(job)
