"""Keras: broken off behind any step, `fit` ends as if nothing had happened.

Behind every step with arrays; with other data where an epoch begins and ends, and within one.
"""

from __future__ import annotations

import pytest

from tests.deep import deep
from tests.integrations.keras_lives import SAMPLES, STEPS, Lives, alike

EVERY = (*range(2, STEPS + 1), None)
EDGES = (2, 6, 7, 8, 10, 12, 13, STEPS, None)
"""The step in which each life ends; the next one resumes the step before it. An epoch has 6 steps."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


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
    crashes = EVERY if data == "arrays" else EDGES
    broken = lives("broken", crashes, **given)
    assert calm["epochs"] == [0, 1, 2]
    assert [life["restored"] for life in broken] == [None, *(crash - 1 for crash in crashes if crash)]
    assert all(life["crashed"] for life in broken[:-1])
    assert alike(broken[-1], calm) == []
    rows = calm["trace"]
    epochs = [[one for row in rows[at : at + 6] for one in row] for at in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3
    assert epochs[0] != epochs[1]
