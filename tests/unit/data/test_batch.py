"""Shares and weights of a step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dlrover_hooks.data.batch import Plan
from dlrover_hooks.errors import UsageError

SHARES = [(b, N, world) for b, N in itertools.product((1, 3, 4), range(1, 8)) for world in range(1, N + 1)]


def plans(n: int, b: int, G: int, world: int, tail: str = "ghost") -> list[Plan]:
    return [Plan(n, b, G, rank, world, tail) for rank in range(world)]  # type: ignore[arg-type]


def test_micro_batches_follow_the_rule() -> None:
    """DL-88: m_i = floor(N/N0) + 1 if i < N % N0, else floor(N/N0)."""
    assert [p.micro_batches for p in plans(100, 4, 20, 3)] == [2, 2, 1]
    assert [p.before for p in plans(100, 4, 20, 3)] == [0, 2, 4]
    assert plans(100, 4, 20, 3)[0].efficiency == pytest.approx(5 / 6)


@pytest.mark.parametrize(("b", "N", "world"), SHARES)
def test_every_step_is_shared_exactly(b: int, N: int, world: int) -> None:
    """DL-87: the slices of all ranks are the step's positions; no rank runs more micro-batches than in a full step."""
    G = b * N
    for left in range(1, G + 1):
        shares = [p.step(10 * G) for p in plans(10 * G + left, b, G, world)]
        real = [s for s in shares if not s.ghost]
        assert [i for s in real for i in range(s.lo, s.hi)] == list(range(10 * G, 10 * G + left))
        assert all(
            1 <= s.micro_batches <= p.micro_batches for s, p in zip(shares, plans(left, b, G, world), strict=True)
        )
        assert all(s.weight == 0 and s.hi - s.lo == 1 for s in shares if s.ghost)
        loops = [
            s.weight * s.micro_batches / p.micro_batches for s, p in zip(shares, plans(G, b, G, world), strict=True)
        ]
        assert sum(loops) == pytest.approx(1)  # each rank's loop yields (j / m) times its mean


def test_lengths_count_the_whole_epoch() -> None:
    assert [(p.length(), p.samples()) for p in plans(46, 4, 20, 3)] == [(5, 18), (5, 18), (3, 10)]
    assert [(p.length(), p.samples()) for p in plans(46, 4, 20, 3, "drop")] == [(4, 16), (4, 16), (2, 8)]
    assert plans(46, 4, 20, 3)[2].length(20) == 2


def test_more_workers_than_micro_batches_names_what_fits() -> None:
    with pytest.raises(UsageError, match="batch_size=4 is the largest that fits"):
        Plan(100, 8, 24, 0, 5)
    with pytest.raises(UsageError, match="at most 4 workers"):
        Plan(100, 4, 4, 0, 5)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((0, 4, 4), "0 samples"),
        ((9, 0, 4), "at least 1"),
        ((9, 4, 6), "multiple"),
        ((9, 4, 4, 2, 2), "rank 2"),
        ((9, 4, 4, 0, 1, "carry"), "carry"),
        ((3, 4, 4, 0, 1, "drop"), "ghost"),
    ],
)
def test_bad_sizes_are_refused(args: tuple[Any, ...], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Plan(*args)


def test_no_step_past_the_end() -> None:
    with pytest.raises(UsageError, match="no step begins"):
        Plan(10, 4, 4, tail="drop").step(8)


def test_fewer_samples_than_a_global_batch() -> None:
    assert [p.length() for p in plans(3, 4, 16, 4)] == [1, 1, 1, 1]
