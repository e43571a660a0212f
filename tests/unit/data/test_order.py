"""The keyed permutations (positions travel, and any place of the order can be asked for)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlrover_hooks.data.feistel import Feistel, keys, splitmix, splitmix_words
from dlrover_hooks.data.order import Order
from dlrover_hooks.errors import UsageError

NEAR = [1, 2, 3, 4, 5, 127, 128, 129, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1]


@pytest.mark.parametrize("n", NEAR)
@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_a_bijection(n: int, shuffle: bool) -> None:
    got = Order(n, 7, shuffle).indices(3, np.arange(n))
    assert got.dtype == np.int64
    assert np.array_equal(np.sort(got), np.arange(n))


@pytest.mark.parametrize(("n", "algo"), [(1 << 17, "keysort"), ((1 << 17) + 1, "feistel6")])
def test_algo_is_named(n: int, algo: str) -> None:
    assert Order(n, 0, True).algo == algo
    assert Order(n, 0, False).algo == "sequential"


def test_order_is_part_of_the_format() -> None:
    """These values are in users' checkpoints: if they change, the algo needs another name."""
    assert Order(10, 7, True).indices(0, np.arange(10)).tolist() == KEYSORT
    assert Order(10**9, 7, True).indices(2, np.arange(5)).tolist() == FEISTEL6
    assert Order(200_000, 7, "blocks").indices(2, np.array([0, 1, 2, 99_999, 199_999])).tolist() == BLOCKS12


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


@pytest.mark.parametrize(("block", "window"), [(1, 2), (2, 1), (3, 2), (7, 3), (100, 7), (1024, 64)])
def test_blocks_are_a_bijection_for_every_n(block: int, window: int) -> None:
    """Also at n where the last block or window is short, or holds one sample."""
    sizes = [*range(1, 40), block * window - 1, block * window, block * window + 1, 5 * block + 1, 7001, 140_001]
    for n in sizes:
        order, places = Order(n, 3, "blocks", block=block, window=window), np.arange(n)
        got = order.indices(1, places)
        assert np.array_equal(np.sort(got), places), n
        some = places[:: max(1, n // 50)][::-1]
        assert np.array_equal(order.indices(1, some), got[some])


def test_blocks_keep_to_a_window_of_blocks() -> None:
    """Storage locality: a block is read within `window * block` positions, in the last window within twice as many."""
    n, block, window = 100_003, 64, 16
    got = Order(n, 1, "blocks", block=block, window=window).indices(0, np.arange(n)) // block
    first = {b: i for i, b in reversed(list(enumerate(got.tolist())))}
    final = {b: i for i, b in enumerate(got.tolist())}
    spans = [final[b] - first[b] for b in first]
    assert max(spans) < 2 * block * window
    assert sum(span >= block * window for span in spans) < 2 * window
    assert sum(span > block * window // 2 for span in spans) > len(spans) * 0.9  # and shuffled in there
    order = [first[b] for b in range(n // block)]
    assert abs(np.corrcoef(order, range(len(order)))[0, 1]) < 4 / len(order) ** 0.5  # the blocks are shuffled


def test_a_small_epoch_in_blocks_is_shuffled_whole() -> None:
    order, seen = Order(3, 0, "blocks"), set()
    for epoch in range(200):
        seen.add(tuple(order.indices(epoch, np.arange(3)).tolist()))
    assert len(seen) == 6


def test_the_network_runs_backward() -> None:
    for n in (1, 2, 5, 100, 4097):
        key = np.array(keys(5, 2, 12), dtype=np.uint64)
        values = Feistel(n).forward(np.arange(n), key)
        assert np.array_equal(Feistel(n).backward(values, key), np.arange(n))


def test_vectors_are_mixed_as_numbers_are() -> None:
    given = [0, 1, 2**63, 2**64 - 1]
    assert splitmix_words(np.array(given, dtype=np.uint64)).tolist() == [splitmix(x) for x in given]


@pytest.mark.parametrize("kind", ["shuffle", "blocks", "sequential"])
def test_positions_run_on_into_the_next_epochs(kind: str) -> None:
    """What tail "carry" asks for."""
    order = Order(50, 4, kind)  # type: ignore[arg-type]
    got = order.onward(2, np.array([10, 48, 49, 50, 51, 99, 100]))
    parts = [order.indices(2, np.array([10, 48, 49])), order.indices(3, np.array([0, 1, 49]))]
    assert got.tolist() == [*np.concatenate(parts).tolist(), *order.indices(4, np.array([0])).tolist()]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"order": "random"}, "shuffle, blocks, sequential"),
        ({"order": "shuffle", "block": 4}, "mean nothing"),
        ({"order": "blocks", "block": 0}, "at least 1"),
        ({"order": "blocks", "block": 1, "window": 1}, "nothing is shuffled"),
    ],
)
def test_orders_that_cannot_be(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        Order(10, 0, **arguments)
    assert caught.value.hint


KEYSORT = [7, 0, 1, 2, 4, 3, 6, 8, 9, 5]
FEISTEL6 = [305293123, 430633250, 265229435, 912542844, 491892592]
BLOCKS12 = [38601, 61969, 4137, 52116, 24005]
