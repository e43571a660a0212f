"""Keras: broken off behind any step, `fit` ends as if nothing had happened.

With `tf.data` in two tests, one of the even steps and one of the odd ones: a life takes up to 14 s on a busy machine.
"""

from __future__ import annotations

import pytest

from tests.deep import deep
from tests.integrations.keras_lives import SAMPLES, STEPS, Lives, alike

CRASHES = {
    "every": range(2, STEPS + 1),
    "even": range(2, STEPS + 1, 2),
    "odd": range(3, STEPS + 1, 2),
}
"""The steps in which a life ends; the next one resumes the step before it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.mark.parametrize(
    ("backend", "data", "which"),
    [
        deep("torch", "arrays", "every"),
        ("torch", "drawn", "every"),
        *(
            deep(backend, data, "every")
            for backend in ("jax", "tensorflow")
            for data in ("arrays", "weighted", "drawn")
        ),
        # not on TensorFlow, which reads a dataset ahead, in threads of its own
        *(deep(backend, "dataset", "every") for backend in ("torch", "jax")),
        *(
            deep(backend, data, which)
            for backend in ("jax", "tensorflow")
            for data in ("tf", "tf.filtered", "tf.global")
            for which in ("even", "odd")
        ),
        *(deep(backend, "numbered", "every") for backend in ("torch", "jax", "tensorflow")),
    ],
    indirect=["backend"],
)
def test_broken_off_behind_every_step_it_is_the_undisturbed_run(lives: Lives, data: str, which: str) -> None:
    """Bit for bit: weights, optimizer, metrics of each epoch, learning rate, and the samples of each step."""
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
