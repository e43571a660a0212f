"""Keras: executions of several batches, kills, mixed precision, and what is refused.

That `fit` can be broken off behind any step is in test_keras_every_step*.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.keras_lives import BACKENDS, STEPS, Lives, alike

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_several_batches_in_one_execution(lives: Lives) -> None:
    """steps_per_execution=4: the last execution of an epoch has the two batches that are left. Not in torch's Keras."""
    calm, *broken = lives("broken", [4, 10, 14, None], calm=True, spe=4)
    assert [life["restored"] for life in broken] == [None, None, 6, 12]
    assert alike(broken[-1], calm) == []


@pytest.mark.deep
def test_killed_it_resumes_from_storage_and_memory(lives: Lives, tmp_path: Path) -> None:
    """kill -9; the next process finds in the keeper what the last one has saved, or else in storage. Another model is
    refused before anything is changed.
    """
    url = str(tmp_path / "saved")
    (calm,) = lives("killed", [8], code=-9, calm=True, kill=True, save_to=url)
    (refused,) = lives("killed", width=6, save_to=url)
    assert re.search(r"kernel has shape \(4, 6\), in the checkpoint \(4, 8\)", refused["why"])
    life, again = lives("killed", [None, None], save_to=url)
    assert life["restored"] == 7
    assert alike(life, calm) == []
    assert again["restored"] == STEPS, "the job is finished: nothing is trained"
    assert again["step"] == STEPS
    assert again["model"] == life["model"]


@pytest.mark.deep
def test_mixed_precision_and_class_weights(lives: Lives, backend: str) -> None:
    """The loss scale is one of the optimizer's variables. No framework is imported beside what Keras imports."""
    given = {"policy": "mixed_float16", "class_weight": True}
    calm, *broken = lives("broken", [5, 11, None], calm=True, **given)
    assert [life["restored"] for life in broken] == [None, 4, 10]
    assert alike(broken[-1], calm) == []
    assert calm["backend"] == backend
    assert calm["added"] == []


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_several_workers_are_refused_but_on_torch(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (refused,) = lives()
    assert "2 workers were started" in refused["why"]
    assert "or set KERAS_BACKEND=torch" in refused["why"]


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
