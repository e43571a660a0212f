"""Runs of keras_cases.py on one backend, for the tests of Keras.

The torch backend runs in this environment. JAX and TensorFlow have one of their own, without torch: `make test-deep`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.deep import deep
from tests.warm import warm

CASES = Path(__file__).with_name("keras_cases.py")
OTHER = ranks.ROOT / ".venv-keras/bin/python"
BACKENDS = ["torch", deep("jax"), deep("tensorflow")]
EXACT = ("step", "trace", "model", "optimizer", "rate", "history", "epochs")
STEPS, SAMPLES = 18, 45
WARM = ("torch._dynamo", "keras")
"""Found imported by processes of the torch backend, see `tests.warm`: nothing of ours."""
Lives = Callable[..., list[dict[str, Any]]]
"""Runs a plan in one process, which ends with `code`; returns what each life reported. See keras_cases.py."""


def lives_of(backend: str, job: str, folder: Path) -> Lives:
    """Runs of a job on this backend. Locks and sockets lie in `folder`."""
    assert backend == "torch" or OTHER.exists(), "make test-deep builds the environment of the other backends"

    def run(name: str = "run", crashes: Any = (None,), code: int = 0, **given: Any) -> list[dict[str, Any]]:
        plan = {"job": f"{job}-{name}", "crashes": list(crashes), **given}
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
        env |= {"KERAS_BACKEND": backend, "PYTHONPATH": str(ranks.ROOT), "XDG_RUNTIME_DIR": str(folder)}
        env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        command = [str(CASES), json.dumps(plan)]
        if backend == "torch":
            process = warm(WARM, env).start(command, env)
        else:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = subprocess.Popen([str(OTHER), *command], env=env, **pipes)
        ((out, said),) = ranks.ended([process], 500)
        assert process.returncode == code, said[-4000:]
        return [json.loads(line) | {"said": said} for line in out.splitlines() if line.startswith("{")]

    return run


def alike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in EXACT if one[name] != other[name]]


CRASHES = {
    "every": range(2, STEPS + 1),
    "even": range(2, STEPS + 1, 2),
    "odd": range(3, STEPS + 1, 2),
}
"""The steps in which a life ends; the next one resumes the step before it."""


def every_step_on(backend: str, *datasets: str) -> pytest.MarkDecorator:
    """Cases of `check_every_step` with `datasets` and `tf.data` on a backend of the other environment.

    With `tf.data` in two tests, one of the even steps and one of the odd ones: a life takes up to 14 s on a busy
    machine.
    """
    whole = [(backend, data, "every") for data in datasets]
    halves = [(backend, data, which) for data in ("tf", "tf.filtered", "tf.global") for which in ("even", "odd")]
    return pytest.mark.parametrize(("backend", "data", "which"), whole + halves, indirect=["backend"])


def check_every_step(lives: Lives, data: str, which: str) -> None:
    """Raises AssertionError unless a run that ends in each step of `CRASHES[which]` is the undisturbed one."""
    given = {"data": data, "batches": 6 if data == "tf.filtered" else None}
    crashes = CRASHES[which]
    calm, *broken = lives("broken", [*crashes, None], calm=True, **given)
    assert calm["epochs"] == [0, 1, 2]
    assert [life["restored"] for life in broken] == [None, *(crash - 1 for crash in crashes)]
    assert all(life["crashed"] for life in broken[:-1])
    assert alike(broken[-1], calm) == []
    rows = calm["trace"]
    epochs = [[one for row in rows[at : at + 6] for one in row] for at in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3
    assert epochs[0] != epochs[1]
