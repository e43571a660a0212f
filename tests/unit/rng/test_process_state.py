"""The random state of a rank: captured and put back exactly, reseeded for a new world."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from dlrover_hooks import rng
from dlrover_hooks.checkpoint.memory.segment import NOTE_BYTES
from dlrover_hooks.checkpoint.state import pytree


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
    flat = pytree.flatten(rng.capture())
    first = draw()
    rng.restore(pytree.unflatten(flat.skeleton, {name: torch.as_tensor(t).clone() for name, t in flat.tensors.items()}))
    assert draw() == first


def test_a_state_fits_into_a_note() -> None:
    """As bytes, without pickle, and small enough to be kept at each step."""
    draw()
    data = msgspec.msgpack.encode(rng.pack(rng.capture()))
    first = draw()
    rng.restore(rng.unpack(msgspec.msgpack.decode(data, type=rng.Packed)))
    assert draw() == first
    assert len(data) < NOTE_BYTES - 512


def test_another_generator_of_numpys_is_left_out() -> None:
    """`set_bit_generator` is rare: the others are kept all the same."""
    state = rng.capture() | {"numpy": {"bit_generator": "PCG64"}}
    assert rng.unpack(rng.pack(state)).keys() == state.keys() - {"numpy"}


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
