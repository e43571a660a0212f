"""Parameter servers under TensorFlow, with real processes: scaled, migrated, killed, stopped, and started again.

Each shard leaves a mark in the model, so a shard that is lost or applied twice is seen.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.ps.shard_order import ShardOrder
from tests.deep import deep
from tests.integrations.ps_job import CHIEF, PYTHON, WAIT_S, ByHand, PSJob, by_hand, environment, ps_job
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(280)]
Start = Callable[..., PSJob]
SHARDS = 600
FIT = CHIEF.with_name("ps_fit.py")
SINCE = 50 + 2 * 16
"""Steps since the newest checkpoint, at most: save_every, and those scheduled when it was due and now."""
WATCHDOG_S = 40.0
"""Longer than a first step, and than the start of the servers, also on a slow machine."""
KINDS = ["raw", deep("keras"), deep("tf_keras")]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A step that reads it waits in the kernel, until its process is killed."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def shard_of_step(step: int) -> int:
    """Number of the shard that this step is made with, by its place in the data."""
    order = ShardOrder(2 * SHARDS, 2)
    shards = [order.take() for _ in range(step)]
    assert shards[-1] is not None
    return shards[-1].begin // 2


def emptied(pipe: Path) -> None:
    """A step that reads it from now on does not wait."""
    empty = pipe.with_name("empty")
    empty.touch()
    empty.replace(pipe)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job of `SHARDS` shards."""
    open_: list[Any] = []

    def begin(
        *options: str,
        ps: int = 1,
        workers: int = 2,
        chief: Path = CHIEF,
        env: dict[str, str] | None = None,
        **plan: Any,
    ) -> PSJob:
        number = len(open_)
        plan = {"samples": 2 * SHARDS, "size": 2, **plan}
        folder = tmp_path / (plan.pop("folder", None) or f"job{number}")
        folder.mkdir(exist_ok=True)
        context = ps_job(folder, "ps-test", plan, *options, ps=ps, workers=workers, chief=chief, **(env or {}))
        job = context.__enter__()
        open_.append(context)
        return job

    yield begin
    for context in reversed(open_):
        context.__exit__(None, None, None)


def trained_once(job: PSJob | ByHand) -> None:
    """Each shard is in the model once, and no result is missing."""
    seen = job.row("seen")["seen"]
    assert seen == [1] * SHARDS, [at for at, count in enumerate(seen) if count != 1]
    assert job.row("done")["done"] == SHARDS


def no_worker_was_replaced(job: PSJob) -> None:
    assert not [line for line in job.said if re.search("the workers are replaced|worker .*; it is replaced", line)]


@pytest.mark.requirement("DL-74", "DL-76", "EZ-8", "EZ-10")
def test_scaled_up_down_and_migrated_no_shard_is_lost_or_repeated(start: Start) -> None:
    """1 to 3 parameter servers, one migrated, down to 1; workers 2 to 3 to 1; the chief's process stays."""
    job = start(holds=[50, 150, 250, 350])
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
def test_a_killed_parameter_server_costs_the_steps_since_the_checkpoint(start: Start) -> None:
    """They are trained again, into the model that was restored: each shard is in it once."""
    job = start(ps=2, holds=[130])
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


def test_parameter_servers_that_are_killed_in_the_middle_of_steps(start: Start) -> None:
    """Three times: what the model has of steps that were cut off is rolled back, and the workers go on."""
    job = start(ps=2, inflight=64)
    for step in (100, 250, 400):
        job.row("step", step)
        old = job.kill("ps 1")
        job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    job.end()
    trained_once(job)
    no_worker_was_replaced(job)


def test_a_parameter_server_that_is_killed_while_the_model_is_exported(start: Start) -> None:
    """`on_end` is called again, with the model on the replacement."""
    job = start(ps=2, holds_end=True)
    job.row("ends")
    old = job.kill("ps 1")
    job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    job.release("end")
    job.end()
    trained_once(job)


@pytest.mark.requirement("DL-92")
@pytest.mark.parametrize("workers", [2, 1])
def test_a_killed_worker_costs_no_shard(start: Start, workers: int) -> None:
    """TensorFlow gives its steps to the other one, or to the replacement, which takes its address: at least once."""
    job = start(workers=workers, holds=[100])
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


def test_a_worker_whose_calls_fail_is_replaced(start: Start, tmp_path: Path) -> None:
    """TensorFlow takes some errors of a connection for errors of the step. So the chief reports the worker."""
    gate = tmp_path / "gate"
    gate.write_text("not empty")
    job = start(hangs_at=shard_of_step(121), gate=str(gate))
    job.says(r"worker \d failed: the chief cannot reach it: .*; it is replaced")
    gate.write_text("")
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}


def test_a_stopped_parameter_server_is_fenced_and_replaced(start: Start) -> None:
    """SIGSTOP: its sockets stay open, so nothing fails by itself. Its lease ends, the launcher kills it."""
    job = start("--hang-timeout", "3s", ps=2, holds=[120])
    job.row("holds", 120)
    job.kill("ps 0", signal.SIGSTOP)
    job.release(120)
    job.says("ps 0 failed: .*; it is replaced")
    job.end()
    trained_once(job)


@pytest.mark.requirement("ED-71")
def test_workers_that_complete_no_step_are_replaced(start: Start, pipe: Path) -> None:
    """They send heartbeats, and a new chief would wait for them as well. The steps since the checkpoint are redone."""
    job = start(ps=2, hangs_at=shard_of_step(121), gate=str(pipe), watchdog_s=WATCHDOG_S)
    job.says("no step was completed for .*: the workers are replaced")
    emptied(pipe)  # before a replacement can begin the step
    job.says(r"worker \d failed: .*no step was completed.*; it is replaced")
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}


def test_a_worker_whose_step_never_ends_does_not_hold_up_the_loss_of_a_parameter_server(
    start: Start, pipe: Path
) -> None:
    """A step keeps a thread of its worker, which must have enough for the next cluster all the same.

    The cold replacement comes late, and no worker is taken for the cause.
    """
    plan = {"hangs_at": shard_of_step(121), "gate": str(pipe), "inflight": 400, "watchdog_s": 200.0}
    job = start("--standby", "0", ps=2, **plan)
    job.row("step", 120)
    old = job.kill("ps 1")
    job.says(rf"ps 1 \(pid {old}\) ended with SIGKILL; it is replaced")
    emptied(pipe)
    job.end()
    trained_once(job)
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}
    no_worker_was_replaced(job)


def test_a_killed_chief_resumes_from_the_checkpoint(start: Start) -> None:
    job = start(holds=[120])
    job.row("holds", 120)
    old = job.kill("chief")
    job.says(r"\] chief: pid", 2)
    job.release(120)
    job.end()
    trained_once(job)
    new = job.pid("chief")
    assert [row["step"] for row in job.rows if row["pid"] == old and "step" in row] == list(range(1, 121))
    assert 121 - SINCE <= next(row["step"] for row in job.rows if row["pid"] == new and "step" in row) <= 121


def test_chief_and_parameter_server_killed_at_once(start: Start) -> None:
    job = start(ps=2, holds=[120])
    job.row("holds", 120)
    job.kill("ps 0")
    job.kill("chief")
    job.release(120)
    job.end()
    trained_once(job)


def test_a_chief_that_has_reconnected_too_often_is_started_anew(start: Start) -> None:
    """TensorFlow leaks memory and threads with each reconnect. The restart is not charged to the budget."""
    job = start("--max-restarts", "0", holds=[100, 200], max_reconnects=1)
    for step, count in ((100, "2"), (200, "1")):
        job.row("holds", step)
        job.scale("--ps", count, "--no-wait")
        job.release(step)
    job.end()
    trained_once(job)
    assert len({row["pid"] for row in job.rows}) > 1


def test_a_finished_job_says_so(start: Start) -> None:
    first = start(folder="same")
    first.end()
    second = start(folder="same")
    second.end()
    assert [row["done"] for row in second.rows if "done" in row] == [SHARDS, SHARDS]
    assert len(second.steps()) == SHARDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_keras(start: Start, kind: str) -> None:
    """Keras 3 without a partitioner, tf_keras with one; a planned switch and a crash."""
    env = {"TF_USE_LEGACY_KERAS": "1"} if kind == "tf_keras" else {}
    job = start(kind=kind, partition=kind != "keras", holds=[100, 200], env=env)
    job.row("holds", 100)
    job.scale("--ps", "2", "--no-wait")
    job.release(100)
    job.row("holds", 200)
    job.kill("ps 1")
    job.release(200)
    job.end()
    trained_once(job)


@pytest.mark.requirement("EZ-9")
@pytest.mark.parametrize("kind", ["raw", "tf_keras"])
def test_weights_and_slots_are_the_same_bits_on_other_parameter_servers(tmp_path: Path, kind: str) -> None:
    """On 2, 1, 2 and 3 of them; each holds a part."""
    command = [str(PYTHON), str(CHIEF.with_name("ps_exact.py")), kind]
    env = environment(tmp_path) | ({"TF_USE_LEGACY_KERAS": "1"} if kind == "tf_keras" else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bit_exact"]
    assert found["arrays"] > 2
    assert found["servers"] == [2, 1, 2, 3]


def test_fit_of_tf_keras_goes_on_when_the_cluster_changes(start: Start) -> None:
    """A planned switch in the middle of an epoch, then a crash: all epochs end, and the loss falls."""
    job = start(chief=FIT, holds=[80, 150])
    job.row("holds", 80)
    job.scale("--ps", "2", "--no-wait")
    job.release(80)
    job.row("holds", 150)
    job.kill("ps 1")
    job.release(150)
    job.end()
    losses = job.row("losses")["losses"]
    assert losses[-1] < losses[0]
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}


def test_fit_of_tf_keras_goes_on_when_workers_complete_no_step(start: Start, pipe: Path) -> None:
    job = start(chief=FIT, gate=str(pipe), watchdog_s=WATCHDOG_S)
    job.says("no step was completed for .*: the workers are replaced")
    emptied(pipe)
    job.end()
    losses = job.row("losses")["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"kind": "keras", "partition": True}, "Keras 3, which cannot use variables that a partitioner"),
        ({"chief": FIT, "kind": "keras", "holds": []}, "Keras 3 cannot fit()"),
        ({"fails_at": 400}, "an error of this very step"),
    ],
)
def test_what_cannot_work_ends_the_job_with_the_reason(start: Start, plan: dict[str, Any], words: str) -> None:
    """With exit code 1 and the chief's traceback, not with restarts."""
    job = start("--max-restarts", "1", **plan)
    said = "\n".join(job.end(code=1))
    assert words in said


def test_a_parameter_server_that_is_never_ready_is_rolled_back(start: Start) -> None:
    """The new server is stopped before it registers: the job goes on with the old set, and `scale` says why."""
    job = start("--standby", "0", holds=[100])
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


def test_the_checkpoint_of_another_model_is_refused(start: Start) -> None:
    start(folder="same", holds=[]).end()
    other = start(folder="same", width=4, epochs=2, holds=[])
    assert "does not fit the model" in "\n".join(other.end(code=1))


def test_tf_config_makes_each_process_a_task(tmp_path: Path) -> None:
    """Started by hand, with a master beside them: one script, three processes; a second chief is refused."""
    with by_hand(tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]}) as job:
        job.row("holds", 100)
        second = job.begin("chief")
        assert "which is alive" in second.communicate(timeout=120)[1]
        assert second.returncode == 1
        job.release(100)
        trained_once(job)
        for name in ("chief", "ps", "worker"):
            assert job.processes[name].wait(60) == 0, name


def test_an_address_that_the_chief_cannot_reach_ends_it_with_the_reason(tmp_path: Path) -> None:
    """TensorFlow alone waits without a word, and with Python's lock held."""
    with by_hand(tmp_path, {}, ps_host="no-such-host.invalid") as job:
        said = job.processes["chief"].communicate(timeout=WAIT_S)[1]
        assert job.processes["chief"].returncode == 1
        assert "failed to connect to ps:0 at no-such-host.invalid:" in said.splitlines()[-1], said


def test_a_new_parameter_server_at_an_unknown_address_is_rolled_back(tmp_path: Path) -> None:
    """The job goes on with the old set, and the new server's process ends."""
    with by_hand(tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]}) as job:
        job.row("holds", 100)
        client = job.master.client("scale")
        client.call(p.ScaleTasks("by-hand", "scale", ps=2))
        wrong = job.begin("ps", 1, "no-such-host.invalid:2222")
        until(lambda: client.call(p.ShowTasks("by-hand")).version > 1, "the version with the new server", WAIT_S)
        job.release(100)
        trained_once(job)
        shown = client.call(p.ShowTasks("by-hand"))
        assert "was rolled back: failed to connect to ps:1 at no-such-host.invalid:2222" in shown.problem
        assert shown.ps == 1
        assert job.processes["chief"].wait(60) == 0
        assert wrong.wait(60) == 0
