"""Runs of keras_cases.py on one backend, for the tests of Keras.

The torch backend runs in this environment. JAX and TensorFlow have one of their own, without torch: `make test-deep`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import ranks
from tests.deep import deep

CASES = Path(__file__).with_name("keras_cases.py")
OTHER = ranks.ROOT / ".venv-keras/bin/python"
BACKENDS = ["torch", deep("jax"), deep("tensorflow")]
EXACT = ("step", "trace", "model", "optimizer", "rate", "history", "epochs")
STEPS, SAMPLES = 18, 45
Lives = Callable[..., list[dict[str, Any]]]
"""Runs a plan in one process; returns what each life reported, and the process' own end as the last one's."""


def lives_of(backend: str, job: str, folder: Path) -> Lives:
    """Runs of a job on this backend. Locks and sockets lie in `folder`."""
    python = sys.executable if backend == "torch" else str(OTHER)
    assert Path(python).exists(), "make test-deep builds the environment of the other backends"

    def run(name: str = "run", crashes: Any = (None,), code: int = 0, **given: Any) -> list[dict[str, Any]]:
        plan = {"job": f"{job}-{name}", "crashes": list(crashes), **given}
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
        env |= {"KERAS_BACKEND": backend, "PYTHONPATH": str(ranks.ROOT), "XDG_RUNTIME_DIR": str(folder)}
        env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(
            [python, str(CASES), json.dumps(plan)], env=env, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == code, done.stderr[-4000:]
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return [life | {"said": done.stderr} for life in found]

    return run


def alike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in EXACT if one[name] != other[name]]
