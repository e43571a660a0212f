"""The random state as it is read in memory is the one that the public calls tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dlrover_hooks import rng
from dlrover_hooks.rng import fast_capture
from dlrover_hooks.rng.fast_capture import RngCapture

_numpy: Any = np.random


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "python": random.random,
    "half of a pair, python": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "half of a pair, numpy": np.random.standard_normal,
    "whole pair, numpy": lambda: np.random.standard_normal(2),
    "torch": lambda: torch.rand(3),
    "half of a pair, torch": lambda: torch.randn(()),
    "half of a pair of doubles, torch": lambda: torch.randn((), dtype=torch.float64),
    "seeds": lambda: (random.seed(4), np.random.seed(4), torch.manual_seed(4)),
    "other seeds, behind which nothing is drawn": lambda: (random.seed(5), np.random.seed(5), torch.manual_seed(5)),
    "a seed with the same words": lambda: torch.manual_seed(5 + 2**32),
    "renewed words": lambda: ([random.random() for _ in range(700)], np.random.rand(700), torch.rand(700)),
}


def test_it_is_that_of_the_public_calls() -> None:
    taking = RngCapture()
    for what, draw in (*DRAWS.items(), *DRAWS.items()):
        draw()
        assert taking.take() == rng.take(), what
        assert taking.take() is taking.take(), "nothing was drawn in between"


def test_a_state_put_back_that_differs_in_what_is_left_of_a_pair_alone() -> None:
    taking = RngCapture()
    np.random.standard_normal()
    half, whole = np.random.get_state(), np.random.standard_normal()
    before = taking.take()
    np.random.set_state(half)
    assert taking.take() == rng.take() != before
    assert np.random.standard_normal() == whole


def test_no_word_is_read_through_the_public_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is where the time goes."""
    taking = RngCapture()
    with monkeypatch.context() as without:
        without.delattr(random, "getstate")
        without.delattr(_numpy, "get_state")
        assert taking.take().packed.numpy is not None


def test_another_generator_of_numpys_comes_back() -> None:
    """`set_bit_generator`, before or behind the first look."""
    early, ours = RngCapture(), _numpy.get_bit_generator()
    _numpy.set_bit_generator(np.random.PCG64(7))
    try:
        for taking in (early, RngCapture()):
            found = taking.take()
            drawn = np.random.rand()
            rng.restore(found.state())
            assert np.random.rand() == drawn
    finally:
        _numpy.set_bit_generator(ours)


def test_where_the_memory_is_another_the_public_calls_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_capture, "_left_over", lambda _: None)
    assert RngCapture().take() == rng.take()
