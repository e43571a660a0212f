"""Shares and weights of a step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.data.batch_plan import BatchPlan, Tail, uneven_shares
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import RankShare, Shares

SHARES = [(b, N, world) for b, N in itertools.product((1, 3, 4), range(1, 8)) for world in range(1, N + 1)]


def plans(n: int, b: int, G: int, world: int, tail: str = "ghost") -> list[BatchPlan]:
    return [BatchPlan(n, b, G, rank, world, tail) for rank in range(world)]  # type: ignore[arg-type]


@pytest.mark.requirement("DL-88")
def test_micro_batches_follow_the_rule() -> None:
    """`m_i = floor(N/N0) + 1 if i < N % N0, else floor(N/N0)`."""
    assert [p.micro_batches for p in plans(100, 4, 20, 3)] == [2, 2, 1]
    assert [p.before for p in plans(100, 4, 20, 3)] == [0, 2, 4]
    assert plans(100, 4, 20, 3)[0].efficiency == pytest.approx(5 / 6)


@pytest.mark.requirement("DL-87")
@pytest.mark.parametrize(("b", "N", "world"), SHARES)
def test_every_step_is_shared_exactly(b: int, N: int, world: int) -> None:
    """The slices of all ranks are the step's positions; no rank runs more micro-batches than in a full step."""
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
        BatchPlan(100, 8, 24, 0, 5)
    with pytest.raises(UsageError, match="at most 4 workers"):
        BatchPlan(100, 4, 4, 0, 5)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((0, 4, 4), "0 samples"),
        ((9, 0, 4), "at least 1"),
        ((9, 4, 6), "multiple"),
        ((9, 4, 4, 2, 2), "rank 2"),
        ((9, 4, 4, 0, 1, "pad"), "ghost, drop, carry"),
        ((3, 4, 4, 0, 1, "carry"), "<= 3"),
        ((9, 2.5, 5, 0, 1), "whole numbers"),
        ((3, 4, 4, 0, 1, "drop"), "ghost"),
    ],
)
def test_bad_sizes_are_refused(args: tuple[Any, ...], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        BatchPlan(*args)


def test_no_step_past_the_end() -> None:
    with pytest.raises(UsageError, match="no step begins"):
        BatchPlan(10, 4, 4, tail="drop").step(8)


def test_fewer_samples_than_a_global_batch() -> None:
    assert [p.length() for p in plans(3, 4, 16, 4)] == [1, 1, 1, 1]


def test_carry_has_full_steps_only() -> None:
    """At the border of epochs a step takes the next one's head; lengths follow from where the epoch began."""
    plan = BatchPlan(10, 2, 4, 0, 1, "carry")
    assert (plan.full_steps(), plan.full_steps(2), plan.length(0), plan.length(2)) == (3, 2, 6, 4)
    assert (plan.step(8).lo, plan.step(8).hi, plan.step(8).end, plan.step(8).weight) == (8, 12, 12, 1.0)
    assert [plan.behind(q) for q in (0, 2, 8)] == [12, 10, 12]
    assert not plan.fixed_length
    assert not plan.has_tail()
    assert BatchPlan(12, 2, 4, 0, 1, "carry").fixed_length
    assert BatchPlan(10, 2, 4, 0, 1, "ghost").fixed_length


@pytest.mark.parametrize(("b", "N", "world"), SHARES)
def test_the_plan_is_visible(b: int, N: int, world: int) -> None:
    """Everybody's m_i, how busy the ranks are, and what would be better."""
    plan = BatchPlan(1000, b, b * N, 0, world)
    assert plan.shares == tuple(p.micro_batches for p in plans(1000, b, b * N, world))
    assert plan.efficiency == pytest.approx(sum(plan.shares) / (world * max(plan.shares)))
    if plan.suggestion is not None:
        smaller = int(plan.suggestion.split("=")[1].split()[0])
        assert BatchPlan(1000, smaller, b * N, 0, world).efficiency > plan.efficiency
        assert plan.suggestion in plan.summary


def test_suggestions_are_given_where_they_help() -> None:
    """N = 8 on 7 workers is 57 % busy, b / 2 makes it 76 %, b / 4 91 %."""
    assert "batch_size=2 would keep the ranks 91% busy" in str(BatchPlan(1000, 8, 64, 0, 7).suggestion)
    assert BatchPlan(1000, 8, 64, 0, 8).suggestion is None
    assert BatchPlan(1000, 1, 8, 0, 7).suggestion is None
    assert "6 x 1" in BatchPlan(1000, 8, 64, 0, 7).summary


def test_a_batch_that_does_not_fit_names_what_does() -> None:
    """More workers than micro-batches, and sizes that do not divide."""
    for arguments in ((100, 8, 20, 0, 1), (100, 8, 24, 0, 5), (100, 32, 8, 0, 1)):
        with pytest.raises(UsageError) as caught:
            BatchPlan(*arguments)
        hint = str(caught.value.hint)
        fits, near = int(hint.split("batch_size=")[1].split()[0]), int(hint.split(", ")[-1].split()[0])
        assert BatchPlan(100, fits, arguments[2], 0, arguments[4])
        assert BatchPlan(100, arguments[1], near, 0, arguments[4])


@st.composite
def distributed(draw: st.DrawFn) -> list[BatchPlan]:
    """The plans of all ranks, with shares as uneven as they can be."""
    shares = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    b = draw(st.integers(1, 4))
    tail: Tail = draw(st.sampled_from(["ghost", "drop", "carry"]))  # type: ignore[assignment]
    G = b * sum(shares)
    n = draw(st.integers(1 if tail == "ghost" else G, 3 * G))
    return [BatchPlan(n, b, G, rank, len(shares), tail, shares) for rank in range(len(shares))]


@given(plans=distributed())
def test_with_any_shares_each_position_is_run_once_and_weights_add_up_to_one(plans: list[BatchPlan]) -> None:
    first, q, seen = plans[0], 0, list[int]()
    while not first.over(q):
        steps = [plan.step(q) for plan in plans]
        assert len({(one.end, one.samples) for one in steps}) == 1
        assert math.isclose(sum(one.weight * (one.micro_batches / p.micro_batches if one.samples < p.global_batch_size
                                              else 1.0) for one, p in zip(steps, plans, strict=True)), 1.0)  # fmt: skip
        seen += [place for one in steps if not one.ghost for place in range(one.lo, one.hi)]
        assert all(one.micro_batches <= plan.micro_batches for one, plan in zip(steps, plans, strict=True))
        if steps[0].samples < first.global_batch_size:
            assert first.tail_shares() == tuple(one.micro_batches for one in steps)
        q = steps[0].end
    assert seen == list(range(q))
    assert q == first.behind(0) if first.tail != "drop" else q == first.full_steps() * first.global_batch_size
    assert [plan.length() for plan in plans] == [
        first.full_steps() * plan.shares[plan.rank] + (first.tail_shares()[plan.rank] if first.has_tail() else 0)
        for plan in plans
    ]


@pytest.mark.parametrize("shares", [(3, 2), (4, 4, 0), (8, 0), (5, 4), (9, -1)])
def test_shares_that_do_not_fit_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="do not distribute 8 micro-batches over 2 workers"):
        BatchPlan(100, 2, 16, 0, 2, shares=shares)


def test_the_plan_says_that_its_shares_are_uneven_on_purpose() -> None:
    plan = BatchPlan(100, 2, 16, 0, 2, shares=(6, 2))
    assert (plan.rebalanced, plan.most, plan.efficiency, plan.suggestion) == (True, 6, 8 / 12, None)
    assert plan.summary.endswith("1 x 6, 1 x 2, because ranks differ in speed")
    assert not BatchPlan(100, 2, 16, 0, 3).rebalanced


@pytest.mark.parametrize(
    ("told", "total", "world", "shares"),
    [
        (None, 8, 2, ()),
        (Shares(8, (RankShare(1, 2),)), 8, 2, (6, 2)),
        (Shares(11, (RankShare(1, 1),)), 11, 4, (4, 1, 3, 3)),
        (Shares(8, (RankShare(1, 2),)), 9, 2, ()),
        (Shares(8, (RankShare(2, 2),)), 8, 2, ()),
        (Shares(8, (RankShare(0, 0),)), 8, 2, ()),
        (Shares(8, (RankShare(0, 7),)), 8, 3, ()),
        (Shares(8, (RankShare(0, 4), RankShare(1, 4))), 8, 2, ()),
    ],
)
def test_told_shares_are_for_the_steps_that_they_are_for(
    told: Shares | None, total: int, world: int, shares: tuple[int, ...]
) -> None:
    assert uneven_shares(told, total, world) == shares
