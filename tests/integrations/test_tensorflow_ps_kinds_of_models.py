"""Models of Keras 3, of tf_keras and of raw variables on TensorFlow's parameter servers, when the cluster changes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ps_job import CHIEF, PYTHON, WATCHDOG_S, PSJob, StartPS, emptied, environment, trained_once

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(280)]
FIT = CHIEF.with_name("ps_fit.py")


def switch_and_crash(job: PSJob, switch: int, crash: int) -> None:
    """A second parameter server joins at step `switch` and is killed at step `crash`. Waits for the end of the job."""
    job.row("holds", switch)
    job.scale("--ps", "2", "--no-wait")
    job.release(switch)
    job.row("holds", crash)
    job.kill("ps 1")
    job.release(crash)
    job.end()


@pytest.mark.parametrize("kind", ["raw", "keras", "tf_keras"])
def test_a_model_of_keras(start_ps: StartPS, kind: str) -> None:
    """A planned switch and a crash. Keras 3 has no partitioner, raw variables and tf_keras have one."""
    env = {"TF_USE_LEGACY_KERAS": "1"} if kind == "tf_keras" else {}
    job = start_ps(kind=kind, partition=kind != "keras", holds=[100, 200], env=env)
    switch_and_crash(job, 100, 200)
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


def test_fit_of_tf_keras_goes_on_when_the_cluster_changes(start_ps: StartPS) -> None:
    """A planned switch in the middle of an epoch, then a crash: all epochs end, and the loss falls."""
    job = start_ps(chief=FIT, holds=[80, 150])
    switch_and_crash(job, 80, 150)
    losses = job.row("losses")["losses"]
    assert losses[-1] < losses[0]
    assert {row["pid"] for row in job.rows} == {job.pid("chief")}


def test_fit_of_tf_keras_goes_on_when_workers_complete_no_step(start_ps: StartPS, pipe: Path) -> None:
    job = start_ps(chief=FIT, gate=str(pipe), watchdog_s=WATCHDOG_S)
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
def test_what_cannot_work_ends_the_job_with_the_reason(start_ps: StartPS, plan: dict[str, Any], words: str) -> None:
    """With exit code 1 and the chief's traceback, not with restarts."""
    job = start_ps("--max-restarts", "1", **plan)
    said = "\n".join(job.end(code=1))
    assert words in said


def test_the_checkpoint_of_another_model_is_refused(start_ps: StartPS) -> None:
    start_ps(folder="same", holds=[]).end()
    other = start_ps(folder="same", width=4, epochs=2, holds=[])
    assert "does not fit the model" in "\n".join(other.end(code=1))
