"""Keras on torch: broken off behind any step, `fit` ends as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.deep import deep
from tests.integrations.keras_lives import Lives, check_every_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.mark.parametrize(
    ("backend", "data", "which"),
    [("torch", "drawn", "every"), *(deep("torch", data, "every") for data in ("arrays", "dataset", "numbered"))],
    indirect=["backend"],
)
def test_broken_off_behind_every_step_it_is_the_undisturbed_run(lives: Lives, data: str, which: str) -> None:
    """Bit for bit: weights, optimizer, metrics of each epoch, learning rate, and the samples of each step."""
    check_every_step(lives, data, which)
