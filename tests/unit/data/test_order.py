"""The keyed permutation."""

from __future__ import annotations

import numpy as np
import pytest

from dlrover_hooks.data.order import Order

NEAR = [1, 2, 3, 4, 5, 127, 128, 129, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1]


@pytest.mark.parametrize("n", NEAR)
@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_a_bijection(n: int, shuffle: bool) -> None:
    got = Order(n, 7, shuffle).indices(3, np.arange(n))
    assert got.dtype == np.int64
    assert np.array_equal(np.sort(got), np.arange(n))


@pytest.mark.parametrize(("n", "algo"), [(1 << 17, "fisher-yates"), ((1 << 17) + 1, "feistel6")])
def test_algo_is_named(n: int, algo: str) -> None:
    assert Order(n, 0, True).algo == algo
    assert Order(n, 0, False).algo == "sequential"


def test_order_is_part_of_the_format() -> None:
    """These values are in users' checkpoints: if they change, the algo needs another name."""
    assert Order(10, 7, True).indices(0, np.arange(10)).tolist() == FISHER_YATES
    assert Order(10**9, 7, True).indices(2, np.arange(5)).tolist() == FEISTEL6


def test_epochs_and_seeds_differ_and_return() -> None:
    order, positions = Order(1000, 1, True), np.arange(1000)
    first = order.indices(0, positions)
    assert not np.array_equal(first, order.indices(1, positions))
    assert not np.array_equal(first, Order(1000, 2, True).indices(0, positions))
    assert np.array_equal(first, order.indices(0, positions))


@pytest.mark.parametrize("n", [1 << 17, 200_000])
def test_order_is_not_correlated(n: int) -> None:
    got = Order(n, 5, True).indices(0, np.arange(n)).astype(float)
    assert abs(np.corrcoef(got, np.arange(n))[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(got[1:], got[:-1])[0, 1]) < 4 / n**0.5


def test_small_orders_are_equally_likely() -> None:
    """All 6 orders of 3 samples, 6000 epochs: chi-square with 5 degrees of freedom below its 1e-5 point (30.9)."""
    order, seen = Order(3, 0, True), {}
    for epoch in range(6000):
        key = tuple(order.indices(epoch, np.arange(3)).tolist())
        seen[key] = seen.get(key, 0) + 1
    assert len(seen) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 30.9


def test_any_place_can_be_asked_for() -> None:
    whole = Order(300_000, 9, True).indices(4, np.arange(300_000))
    assert np.array_equal(
        Order(300_000, 9, True).indices(4, np.array([[299_999, 0], [5, 5]])), whole[[[299_999, 0], [5, 5]]]
    )


FISHER_YATES = [5, 1, 0, 2, 6, 8, 7, 4, 9, 3]
FEISTEL6 = [305293123, 430633250, 265229435, 912542844, 491892592]
