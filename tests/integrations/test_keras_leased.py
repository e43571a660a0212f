"""Keras with leased shards: every sample is in the model once, wherever `fit` is broken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deep import deep
from tests.integrations.keras_lives import BACKENDS, SAMPLES, STEPS, Lives, alike

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


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
