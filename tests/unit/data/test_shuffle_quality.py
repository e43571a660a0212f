"""Is a shuffle one? Serial correlation, position x value, and neighbours that stay neighbours, against the theory.

Each order gives rows of numbers whose *ranks* must be a random permutation: a whole epoch where it is small, runs and
strides of positions where it is huge, and for blocks what happens within windows and between them. Seeds are fixed and
thresholds are 4.5 standard deviations, so a failure is a change, not bad luck. Controls that must fail are at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrover_hooks.data.feistel import Feistel, keys
from dlrover_hooks.data.order import Order

Row = NDArray[np.int64]
LIMIT = 4.5
SEEDS = range(12)  # 24 neighbours expected: to find none is 4.9 deviations
RUN = 1 << 15
SMALL = [257, 1000, 1009, 4097, (1 << 17) - 1, 1 << 17]
LARGE = [(1 << 17) + 1, 200_003]
HUGE = [10**9 + 7, (1 << 30) + 1, 10**12 - 1]


def whole(n: int) -> Iterator[Row]:
    """An epoch of `shuffle` per seed."""
    yield from (Order(n, seed).indices(seed % 3, np.arange(n)) for seed in SEEDS)


def parts(n: int) -> Iterator[Row]:
    """Runs of a huge epoch, at the start, in the middle and at the end, and strides through all of it."""
    for seed in SEEDS:
        order = Order(n, seed)
        begin = (0, n // 3, n - RUN)[seed % 3]
        yield order.indices(0, np.arange(begin, begin + RUN))
        yield order.indices(0, np.arange(RUN) * (n // RUN) + seed)


def windows(n: int, block: int, window: int) -> Iterator[Row]:
    """Samples within a window of blocks; the windows that have the short block, or are the last, too."""
    size = block * window
    for seed in SEEDS:
        order, count = Order(n, seed, "blocks", block=block, window=window), -(-n // block)
        if (count % window == 0 and n % block == 0) or n >= 1 << 20:
            yield order.indices(0, np.arange(size, 2 * size))
        else:
            yield order.indices(0, np.arange(size * (count // window - 1) + block, n))


def rows_of_blocks(n: int, block: int, window: int) -> Iterator[Row]:
    """The blocks in the order of the windows they are read in: between windows the order must be random."""
    for seed in SEEDS:
        got = Order(n, seed, "blocks", block=block, window=window).indices(0, np.arange(n)) // block
        _, first = np.unique(got, return_index=True)
        yield np.argsort(first)


def ranks(row: Row) -> Row:
    found = np.empty(len(row), dtype=np.int64)
    found[np.argsort(row)] = np.arange(len(row))
    return found


def serial(row: Row) -> float:
    """Correlation of neighbours, in standard deviations (mean -1/n, variance 1/n)."""
    x = row - (len(row) - 1) / 2
    return float((x[1:] @ x[:-1] / (x @ x) + 1 / len(row)) * len(row) ** 0.5)


def placed(row: Row) -> float:
    """Position x value in equal classes: chi-square with (k - 1)^2 degrees of freedom, in standard deviations."""
    n, k = len(row), 32 if len(row) >= RUN else 8
    cells = np.arange(n) * k // n * k + row * k // n
    table = np.bincount(cells, minlength=k * k).reshape(k, k)
    want = np.outer(table.sum(1), table.sum(0)) / n
    freedom = (k - 1) ** 2
    return float((((table - want) ** 2 / want).sum() - freedom) / (2 * freedom) ** 0.5)


def adjacent(row: Row) -> int:
    """Neighbours whose ranks differ by 1: a Poisson number with mean 2."""
    return int((np.abs(np.diff(row)) == 1).sum())


def faults(rows: Iterator[Row]) -> list[str]:
    """The tests that these rows fail."""
    found: dict[str, list[float]] = {"serial": [], "placed": [], "adjacent": []}
    for row in map(ranks, rows):
        for name, test in (("serial", serial), ("placed", placed), ("adjacent", adjacent)):
            found[name].append(test(row))
    count = len(found["serial"])
    bad = [name for name in ("serial", "placed") if max(map(abs, found[name])) > LIMIT]
    bad += [f"mean {name}" for name in ("serial", "placed") if abs(sum(found[name])) > LIMIT * count**0.5]
    return bad + ["adjacent"] * (abs(sum(found["adjacent"]) - 2 * count) > LIMIT * (2 * count) ** 0.5)


@pytest.mark.parametrize("n", SMALL + LARGE)
def test_whole_epochs_are_shuffled(n: int) -> None:
    """The table up to 2**17, the Feistel walk above."""
    assert faults(whole(n)) == []


@pytest.mark.deep
@pytest.mark.parametrize("n", HUGE)
def test_huge_epochs_are_shuffled(n: int) -> None:
    """2**30 + 1 is the longest walk: half of the network's values lie outside."""
    assert faults(parts(n)) == []


@pytest.mark.parametrize(
    ("n", "block", "window"),
    [(10_007, 16, 32), (40_000, 64, 64), (99_991, 10, 100), (10**9 + 7, 1024, 64), (10**9 + 7, 100, 41)],
)
def test_windows_of_blocks_are_shuffled(n: int, block: int, window: int) -> None:
    assert faults(windows(n, block, window)) == []


@pytest.mark.parametrize("n", [40_003, 40_000])
def test_blocks_are_shuffled(n: int) -> None:
    """In windows of one block each the order of the blocks is seen as it is."""
    assert faults(rows_of_blocks(n, 20, 1)) == []


def test_epochs_are_shuffled_apart() -> None:
    """The order of one epoch as it looks from another, and of one seed from the next."""
    for n in (4097, 200_003):
        base = np.argsort(Order(n, 1).indices(0, np.arange(n)))
        others = [Order(n, 1).indices(epoch, np.arange(n)) for epoch in range(1, 9)]
        others += [Order(n, seed).indices(0, np.arange(n)) for seed in range(2, 10)]
        assert faults(base[other] for other in others) == []


def affine(n: int) -> Iterator[Row]:
    for seed in SEEDS:
        yield (np.arange(min(n, RUN)) * (int(0.618 * n) | 1) + seed) % n


def thin(rounds: int) -> Iterator[Row]:
    """Feistel with too few rounds."""
    for seed in SEEDS:
        network = Feistel(200_003)
        yield network.forward(np.arange(200_003), np.array(keys(seed, 0, rounds), dtype=np.uint64))


def in_blocks() -> Iterator[Row]:
    """Blocks are not a full shuffle, and the docs say so."""
    for seed in SEEDS:
        yield Order(65_536, seed, "blocks", block=512, window=2).indices(0, np.arange(65_536))


@pytest.mark.parametrize(
    ("control", "fails"),
    [
        (lambda: affine(4097), {"serial", "placed", "adjacent"}),
        (lambda: affine(10**9 + 7), {"serial", "placed", "adjacent"}),
        (lambda: iter([np.arange(5000)] * 4), {"serial", "placed", "adjacent"}),
        (lambda: thin(2), {"placed"}),
        (in_blocks, {"serial", "placed"}),
    ],
)
def test_what_is_no_shuffle_is_found_out(control: Callable[[], Iterator[Row]], fails: set[str]) -> None:
    assert fails <= set(faults(control()))
