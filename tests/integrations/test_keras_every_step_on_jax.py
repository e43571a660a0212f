"""Keras on JAX: broken off behind any step, `fit` ends as if nothing had happened.

With `tf.data` in two tests, one of the even steps and one of the odd ones: a life takes up to 14 s on a busy machine.
"""

from __future__ import annotations

import pytest

from tests.integrations.keras_lives import Lives, check_every_step

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.mark.parametrize(
    ("backend", "data", "which"),
    [
        *(("jax", data, "every") for data in ("arrays", "weighted", "drawn", "dataset", "numbered")),
        *(("jax", data, which) for data in ("tf", "tf.filtered", "tf.global") for which in ("even", "odd")),
    ],
    indirect=["backend"],
)
def test_broken_off_behind_every_step_it_is_the_undisturbed_run(lives: Lives, data: str, which: str) -> None:
    """Bit for bit: weights, optimizer, metrics of each epoch, learning rate, and the samples of each step."""
    check_every_step(lives, data, which)
