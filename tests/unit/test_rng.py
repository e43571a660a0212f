"""The random state of a rank: captured and put back exactly, reseeded for a new world (DL-81)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dlrover_hooks import rng
from dlrover_hooks.checkpoint import tree


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def draw() -> tuple[float, float, float, float]:
    # an odd number of normals: Python and NumPy keep the second one of a pair
    return random.gauss(0, 1), float(np.random.normal()), float(torch.rand(())), float(torch.randn(()))


def test_what_was_captured_comes_back() -> None:
    draw()
    state = rng.capture()
    first, second = draw(), draw()
    rng.restore(state)
    assert (draw(), draw()) == (first, second)


def test_a_state_survives_a_checkpoint() -> None:
    """As plain values and tensors: no pickle on the way."""
    draw()
    flat = tree.flatten(rng.capture())
    first = draw()
    rng.restore(tree.unflatten(flat.skeleton, {name: torch.as_tensor(t).clone() for name, t in flat.tensors.items()}))
    assert draw() == first


def test_capturing_draws_nothing() -> None:
    state = rng.capture()
    first = draw()
    rng.restore(state)
    rng.capture()
    assert draw() == first


def test_reseeding_differs_by_every_part_and_repeats() -> None:
    found = []
    for parts in ((7, 1, 0), (7, 1, 1), (7, 2, 0), (8, 1, 0), (7, 1, 0)):
        rng.reseed(*parts)
        found.append(draw())
    assert found[0] == found[4]
    for number in range(4):
        assert len({one[number] for one in found}) == 4


def test_a_state_without_numpy_restores_the_rest() -> None:
    state = rng.capture()
    state.pop("numpy")
    wanted = random.random()
    rng.restore(state)
    assert random.random() == wanted
