"""Bad input to the TensorFlow adapter that needs no cluster: each message says what is wrong and what to do instead."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integrations.ps_job import CHIEF, PYTHON, environment


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case: the classes of the error, and its text."""
    folder = tmp_path_factory.mktemp("refusals")
    assert PYTHON.exists(), "make test-deep builds the environment that has TensorFlow"
    command = [str(PYTHON), str(CHIEF.with_name("ps_refusals.py")), str(folder)]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("case", "error", "words", "hint"),
    [
        (
            "other shape",
            "UsageError",
            "does not fit the model: Received incompatible tensor with shape (8, 4)",
            "never",
        ),
        ("other name", "UsageError", "does not fit the model", "start over (resume='never')"),
        ("other release", "UsageError", "was written in format 2, this release reads 1", "release of dlrover-hooks"),
        ("other adapter", "UsageError", "has checkpoints of another adapter (latest.json)", "save_to of its own"),
        ("torn", "Corrupt", "latest-ps.json cannot be read", "put back an older one"),
        ("gone", "NoCheckpoint", "model is gone", ""),
        ("no program", "UsageError", "build(strategy) returned", "return PSProgram(step"),
        ("resume", "UsageError", "resume='maybe'", "give 'auto' or 'never'"),
        ("no task", "UsageError", "PSTrainer needs a cluster", "dlrover-hooks run --ps 1 --workers 1"),
        ("no tf_keras", "ImportError", "needs tf_keras", "pip install --no-deps tf_keras"),
        ("no such name", "AttributeError", "has no attribute 'PSTrainr'", ""),
    ],
)
def test_bad_input_is_refused(said: dict[str, Any], case: str, error: str, words: str, hint: str) -> None:
    classes, text = said[case]
    assert error in classes, said[case]
    assert words in text
    assert hint in text


@pytest.mark.deep
def test_the_documented_names_can_be_imported(said: dict[str, Any]) -> None:
    """Those that need tf_keras, too. And one TensorFlow is installed, beside tf_keras."""
    assert said["names"] == ["PSReconnect", "PSClusterChanged", "fit_elastic"]
    assert len(said["distributions"]) == 1, said["distributions"]


def test_without_tensorflow_the_import_names_the_extra() -> None:
    program = "import sys; sys.modules['tensorflow'] = None; import dlrover_hooks.integrations.tensorflow"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "ImportError: TensorFlow is not installed: pip install 'dlrover-hooks[tensorflow]'" in done.stderr
