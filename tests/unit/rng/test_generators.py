"""The global generators: seeded, saved, restored, and cheaply seen to have been drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dlrover_hooks.rng.generators import (
    Generator,
    NumpyGenerator,
    Public,
    PythonGenerator,
    TorchGenerator,
    TwisterWords,
    generators,
)

KINDS: list[tuple[type[Any], Callable[[], float]]] = [
    (PythonGenerator, random.random),
    (NumpyGenerator, np.random.rand),
    (TorchGenerator, lambda: torch.rand(1).item()),
]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    saved = [(one, one.save()) for one in generators()]
    yield
    for one, state in saved:
        one.restore(state)


def slow(one: Generator) -> Generator:
    """As on a platform where the words are not found in memory."""
    one.words = Public(lambda: one.save().tolist() if isinstance(one, TorchGenerator) else one.save())
    return one


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize(("kind", "draw"), KINDS)
def test_draws_are_seen_and_undone(kind: type[Any], draw: Callable[[], float], found: bool) -> None:
    """One draw, and 624, which bring the index back to where it was."""
    one = kind() if found else slow(kind())
    assert type(one.words) is (TwisterWords if found else Public)
    one.seed((1 << 64) - 3)
    for draws in (1, 312, 624, 1248):
        mark, words, whole = one.words.mark.value, one.words.copy(), one.save()
        assert one.words.mark.value == mark
        first = [draw() for _ in range(draws)]
        assert one.words.mark.value != mark
        for state in (words, whole):
            one.restore(state)
            assert [draw() for _ in range(draws)] == first


@pytest.mark.parametrize(("kind", "draw"), KINDS)
def test_seeds_decide(kind: type[Any], draw: Callable[[], float]) -> None:
    one, got = kind(), []
    for seed in (7, 8, 7):
        one.seed(seed)
        got.append([draw() for _ in range(3)])
    assert got[0] == got[2] != got[1]


def test_a_saved_state_has_the_second_normal_number() -> None:
    for one, draw in (
        (PythonGenerator(), lambda: random.gauss(0, 1)),
        (NumpyGenerator(), lambda: np.random.randn()),
        (TorchGenerator(), lambda: torch.randn(1).item()),
    ):
        draw()
        state, second = one.save(), draw()
        draw()
        one.restore(state)
        assert draw() == second


def test_another_numpy_engine_is_left_alone() -> None:
    numpy: Any = np.random
    engine = numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.PCG64())
    try:
        assert [type(one) for one in generators()] == [PythonGenerator, TorchGenerator]
    finally:
        numpy.set_bit_generator(engine)
