"""Keras: executions of several batches, kills, mixed precision, and what is refused.

That `fit` can be broken off behind any step is in test_keras_every_step.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.keras_lives import BACKENDS, STEPS, Lives, alike

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


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
