"""Keras: broken off behind any step, `fit` ends as if nothing had happened. The runs are in keras_cases.py.

The torch backend runs in this environment. JAX and TensorFlow have one of their own, without torch: `make test-deep`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.deep import deep

CASES = Path(__file__).with_name("keras_cases.py")
OTHER = ranks.ROOT / ".venv-keras/bin/python"
BACKENDS = ["torch", deep("jax"), deep("tensorflow")]
EXACT = ("step", "trace", "model", "optimizer", "rate", "history", "epochs")
STEPS, SAMPLES = 18, 45
Lives = Callable[..., list[dict[str, Any]]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def job() -> Iterator[str]:
    with ranks.named_job("keras") as name:
        yield name


@pytest.fixture
def lives(backend: str, job: str, tmp_path: Path) -> Lives:
    """Runs a plan in one process; returns what each life reported, and the process' own end as the last one's."""
    python = sys.executable if backend == "torch" else str(OTHER)
    assert Path(python).exists(), "make test-deep builds the environment of the other backends"

    def run(name: str = "run", crashes: Any = (None,), code: int = 0, **given: Any) -> list[dict[str, Any]]:
        plan = {"job": f"{job}-{name}", "crashes": list(crashes), **given}
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
        env |= {"KERAS_BACKEND": backend, "PYTHONPATH": str(ranks.ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
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


@pytest.mark.parametrize(
    ("backend", "data"),
    [
        ("torch", "arrays"),
        ("torch", "drawn"),
        *(deep(backend, data) for backend in ("jax", "tensorflow") for data in ("arrays", "weighted")),
        *(deep(backend, "dataset") for backend in ("torch", "jax")),  # TensorFlow reads ahead, in threads of its own
        *(deep(backend, "drawn") for backend in ("jax", "tensorflow")),
        *(deep(backend, data) for backend in ("jax", "tensorflow") for data in ("tf", "tf.filtered", "tf.global")),
        *(deep(backend, "numbered") for backend in ("torch", "jax", "tensorflow")),
    ],
    indirect=["backend"],
)
def test_broken_off_behind_every_step_it_is_the_undisturbed_run(lives: Lives, data: str) -> None:
    """Bit for bit: weights, optimizer, metrics of each epoch, learning rate, and the samples of each step."""
    given = {"data": data, "batches": 6 if data == "tf.filtered" else None}
    (calm,) = lives("calm", **given)
    broken = lives("broken", [*range(2, STEPS + 1), None], **given)
    assert calm["epochs"] == [0, 1, 2]
    assert [life["restored"] for life in broken] == [None, *range(1, STEPS)]
    assert all(life["crashed"] for life in broken[:-1])
    assert alike(broken[-1], calm) == []
    rows = calm["trace"]
    epochs = [[one for row in rows[at : at + 6] for one in row] for at in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_several_batches_in_one_execution(lives: Lives) -> None:
    """steps_per_execution=4: the last execution of an epoch has the two batches that are left. Not in torch's Keras."""
    (calm,) = lives("calm", spe=4)
    broken = lives("broken", [4, 10, 14, None], spe=4)
    assert [life["restored"] for life in broken] == [None, None, 6, 12]
    assert alike(broken[-1], calm) == []


def test_killed_it_resumes_from_storage_and_memory(lives: Lives, tmp_path: Path) -> None:
    """kill -9; the next process finds in the keeper what the last one has saved, or else in storage."""
    url = str(tmp_path / "saved")
    (calm,) = lives("calm")
    assert lives("killed", [8], code=-9, kill=True, save_to=url) == []
    (life,) = lives("killed", save_to=url)
    assert life["restored"] == 7
    assert alike(life, calm) == []
    (again,) = lives("killed", save_to=url)
    assert again["restored"] == STEPS, "the job is finished: nothing is trained"
    assert again["step"] == STEPS
    assert again["model"] == life["model"]


def test_mixed_precision_and_class_weights(lives: Lives) -> None:
    """The loss scale is one of the optimizer's variables."""
    given = {"policy": "mixed_float16", "class_weight": True}
    (calm,) = lives("calm", **given)
    broken = lives("broken", [5, 11, None], **given)
    assert [life["restored"] for life in broken] == [None, 4, 10]
    assert alike(broken[-1], calm) == []


def test_no_framework_is_imported_beside_what_keras_imports(lives: Lives, backend: str) -> None:
    (life,) = lives(epochs=1)
    assert life["backend"] == backend
    assert life["added"] == []


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_several_workers_are_refused_but_on_torch(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (refused,) = lives()
    assert "2 workers were started" in refused["why"]
    assert "or set KERAS_BACKEND=torch" in refused["why"]


def test_another_model_is_refused(lives: Lives) -> None:
    """Before anything is changed; the error of the child is in its output."""
    (life,) = lives("one", [3])
    assert life["crashed"]
    (refused,) = lives("one", width=6)
    assert re.search(r"kernel has shape \(4, 6\), in the checkpoint \(4, 8\)", refused["why"])


@pytest.mark.parametrize("backend", BACKENDS[1:2], indirect=True)
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("endless", "is infinite.*leave .repeat"),
        ("filtered", r"its cardinality is unknown.*el.data\(dataset, batches=N\)"),
        ("unseeded", r"shuffled without a seed.*dataset.shuffle\(size, seed=1\)"),
        ("quick", "deterministic=False"),
        ("uncached", r"shuffled before it is cached.*dataset.cache\(\).shuffle"),
    ],
)
def test_tensor_datasets_without_places_are_refused(lives: Lives, form: str, words: str) -> None:
    (refused,) = lives(data=f"tf.{form}")
    assert re.search(words, refused["why"], re.DOTALL)


def each_once(life: dict[str, Any]) -> bool:
    """Whether the model holds every sample once in each epoch, one epoch after the other."""
    ids = [one for row in life["trace"] for one in row]
    return [sorted(ids[at : at + SAMPLES]) for at in range(0, len(ids), SAMPLES)] == [list(range(SAMPLES))] * 3


@pytest.mark.parametrize(
    ("backend", "every"), [("torch", 1), deep("jax", 4), deep("tensorflow", 4)], indirect=["backend"]
)
def test_leased_samples_are_in_the_model_once_wherever_it_is_broken_off(lives: Lives, every: int) -> None:
    """The next batch is already fetched then. Its samples, and those since the cut, are lent out again. Leases of a
    fixed size give the same batches, so it is the undisturbed run, too.
    """
    (calm,) = lives("calm", data="leased")
    found = lives("broken", [*range(2, STEPS + 1, every), None], data="leased")
    assert [life["crashed"] for life in found] == [True] * (len(found) - 1) + [False]
    assert [life["restored"] for life in found] == [None, *range(1, STEPS, every)]
    assert each_once(found[-1])
    assert alike(found[-1], calm) == []
    assert "torch" not in found[-1]["added"]


def test_leased_samples_are_in_the_model_once_after_a_kill(lives: Lives, tmp_path: Path) -> None:
    url = str(tmp_path / "saved")
    assert lives("killed", [13], code=-9, kill=True, data="leased", save_to=url) == []
    (life,) = lives("killed", data="leased", save_to=url)
    assert life["restored"] == 12
    assert each_once(life)


@pytest.mark.parametrize("backend", BACKENDS[2:], indirect=True)
def test_leased_shards_are_applied_one_by_one(lives: Lives) -> None:
    (refused,) = lives(data="leased", spe=4)
    assert "steps_per_execution must be 1 with leased shards" in refused["why"]
