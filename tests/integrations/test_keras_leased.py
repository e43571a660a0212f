"""Keras with leased shards: every sample is in the model once, wherever `fit` is broken off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.keras_lives import BACKENDS, SAMPLES, STEPS, Lives, alike

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


def each_once(life: dict[str, Any]) -> bool:
    """Whether the model holds every sample once in each epoch, one epoch after the other."""
    ids = [one for row in life["trace"] for one in row]
    return [sorted(ids[at : at + SAMPLES]) for at in range(0, len(ids), SAMPLES)] == [list(range(SAMPLES))] * 3


@pytest.mark.deep
@pytest.mark.parametrize(("backend", "every"), [("torch", 1), ("jax", 4), ("tensorflow", 4)], indirect=["backend"])
def test_leased_samples_are_in_the_model_once_wherever_it_is_broken_off(lives: Lives, every: int) -> None:
    """The last time by a kill. The next batch is already fetched then. Its samples, and those since the cut, are lent
    out again. Leases of a fixed size give the same batches, so it is the undisturbed run, too.
    """
    crashes = range(2, STEPS + 1, every)
    calm, *found = lives("broken", crashes, code=-9, calm=True, kill=True, data="leased")
    found += lives("broken", data="leased")
    assert [life["crashed"] for life in found] == [True] * (len(found) - 1) + [False]
    resumed = [None, *range(1, STEPS, every)]
    assert [life["restored"] for life in found] == resumed[:-2] + resumed[-1:], "the killed life has told nothing"
    assert each_once(found[-1])
    assert alike(found[-1], calm) == []
    assert "torch" not in found[-1]["added"]


@pytest.mark.parametrize("backend", BACKENDS[2:], indirect=True)
def test_leased_shards_are_applied_one_by_one(lives: Lives) -> None:
    (refused,) = lives(data="leased", spe=4)
    assert "steps_per_execution must be 1 with leased shards" in refused["why"]
