"""Keras on JAX: broken off behind any step, `fit` ends as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.integrations.keras_lives import Lives, check_every_step, every_step_on

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(560)]


@every_step_on("jax", "arrays", "weighted", "drawn", "dataset", "numbered")
def test_broken_off_behind_every_step_it_is_the_undisturbed_run(lives: Lives, data: str, which: str) -> None:
    """Bit for bit: weights, optimizer, metrics of each epoch, learning rate, and the samples of each step."""
    check_every_step(lives, data, which)
