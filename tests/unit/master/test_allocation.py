"""Nodes of a cluster are divided among jobs: never more than there are, and at the least cost."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.scaling.allocation import (
    FAIRNESS,
    GAP,
    GROWTH,
    ClusterAllocation,
    Demand,
    JobConfiguration,
    allocate,
)

SIZES = (1, 2, 4, 8)


def job(
    name: str, *, scaling: float = 1.0, sizes: tuple[int, ...] = SIZES, has: int = 0, tenant: str = "",
    weight: float = 1.0,
) -> Demand:  # fmt: skip
    """Goodput `n ** scaling` on n nodes, started an hour ago if it `has` nodes."""
    return Demand(
        name,
        tuple(JobConfiguration("node", size, size**scaling) for size in sizes),
        tenant,
        weight,
        current=("node", has) if has else None,
        age_s=3600.0 if has else 0.0,
        restart_s=30.0,
    )


def nodes(found: ClusterAllocation) -> dict[str, int]:
    return {name: one.nodes for name, one in found.given.items()}


def test_alike_jobs_get_alike_shares() -> None:
    assert nodes(allocate([job(name, scaling=0.8) for name in "abcd"], {"node": 16})) == dict.fromkeys("abcd", 4)


def test_nodes_go_where_they_are_of_more_use() -> None:
    found = nodes(allocate([job("linear"), job("flat", scaling=0.1)], {"node": 9}))
    assert found == {"linear": 8, "flat": 1}


def test_the_kind_that_suits_a_job_better() -> None:
    both = Demand("a", (JobConfiguration("old", 2, 2.0), JobConfiguration("new", 2, 6.0)))
    slow = Demand("b", (JobConfiguration("old", 2, 2.0), JobConfiguration("new", 2, 2.1)))
    found = allocate([both, slow], {"old": 2, "new": 2}).given
    assert {name: one.kind for name, one in found.items()} == {"a": "new", "b": "old"}


def test_a_job_grows_at_most_twofold_in_a_round() -> None:
    assert nodes(allocate([job("a", has=2)], {"node": 64})) == {"a": 2 * GROWTH}


def test_a_small_gain_is_not_worth_a_restart() -> None:
    """A job that was restarted every ten minutes keeps its nodes where a new one takes more."""
    restless = Demand(
        "a", job("a", scaling=0.1).configurations, current=("node", 4), age_s=3600, restarts=6, restart_s=120
    )
    assert nodes(allocate([restless], {"node": 8})) == {"a": 4}
    assert nodes(allocate([job("a", scaling=0.1)], {"node": 8})) == {"a": 8}


def test_a_job_whose_nodes_are_gone_gets_fewer_and_does_not_wait() -> None:
    restless = Demand("a", job("a").configurations, current=("node", 8), age_s=600, restarts=20, restart_s=30)
    assert nodes(allocate([restless], {"node": 5})) == {"a": 4}


def test_what_does_not_fit_waits() -> None:
    assert allocate([job("a", sizes=(8,))], {"node": 7}) == ClusterAllocation({}, optimal=True)
    assert list(nodes(allocate([job("a", sizes=(8,)), job("b", sizes=(8,))], {"node": 15})).values()) == [8]
    assert allocate([], {"node": 7}) == ClusterAllocation({}, optimal=True)
    assert allocate([job("a")], {}) == ClusterAllocation({}, optimal=True)


def test_weights_decide_which_one_waits() -> None:
    both = [job("a", sizes=(8,)), job("b", sizes=(8,), weight=2.0)]
    assert nodes(allocate(both, {"node": 15})) == {"b": 8}


def test_a_tenant_gets_no_more_than_its_quota() -> None:
    demands = [job(name, tenant="small") for name in "ab"] + [job("c", tenant="large")]
    found = nodes(allocate(demands, {"node": 16}, {"small": 3}))
    assert found["a"] + found["b"] == 3
    assert found["c"] == 8


def test_without_time_jobs_keep_their_nodes() -> None:
    demands = [job(f"job-{n}", has=2 if n < 30 else 0) for n in range(60)]
    found = allocate(demands, {"node": 80}, time_limit_s=0.0)
    assert not found.optimal
    assert Counter(nodes(found).values()) == {2: 30, 1: 20}
    assert all(found.given[f"job-{n}"].nodes == 2 for n in range(30))


def _cost(demand: Demand, one: JobConfiguration | None) -> float:
    """Of jobs that do not run yet, all of weight 1."""
    least = min(each.goodput for each in demand.configurations)
    if one is None:
        return max((each.goodput / least) ** FAIRNESS for each in demand.configurations) + min(
            each.nodes for each in demand.configurations
        )
    return (one.goodput / least) ** FAIRNESS


_DEMANDS = st.lists(
    st.tuples(st.floats(0.1, 1.0), st.sets(st.sampled_from((1, 2, 3, 5)), min_size=1), st.sampled_from(("x", "y"))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(_DEMANDS, st.integers(5, 20), st.integers(0, 10))
def test_no_other_allocation_costs_less(rows: list[tuple[float, set[int], str]], capacity: int, quota: int) -> None:
    """Compared with all of them."""
    demands = [job(f"job-{n}", scaling=a, sizes=tuple(b), tenant=c) for n, (a, b, c) in enumerate(rows)]

    def fits(choice: tuple[JobConfiguration | None, ...]) -> bool:
        used = [one.nodes if one else 0 for one in choice]
        of_tenant = sum(n for n, demand in zip(used, demands, strict=True) if demand.tenant == "x")
        return sum(used) <= capacity and of_tenant <= quota

    found = allocate(demands, {"node": capacity}, {"x": quota})
    taken = tuple(found.given.get(demand.job) for demand in demands)
    assert found.optimal
    assert fits(taken)
    every = itertools.product(*((*demand.configurations, None) for demand in demands))
    costs = [sum(map(_cost, demands, choice)) for choice in every if fits(choice)]
    assert sum(map(_cost, demands, taken)) <= min(costs) + GAP * sum(_cost(demand, None) for demand in demands) + 1e-6


@settings(max_examples=60)
@given(_DEMANDS, st.integers(0, 20))
def test_no_job_waits_only_in_order_that_others_grow(rows: list[tuple[float, set[int], str]], more: int) -> None:
    demands = [job(f"job-{n}", scaling=a, sizes=tuple(b)) for n, (a, b, _) in enumerate(rows)]
    capacity = sum(min(b) for _, b, _ in rows) + more
    assert len(allocate(demands, {"node": capacity}).given) == len(demands)


def test_of_many_jobs_none_waits_because_the_solver_stopped_early() -> None:
    """The solver's gap is relative to the cost of all jobs, which may be many times that of one that waits."""
    demands = [job(f"job-{n}", scaling=0.5 + (n * 7 % 50) / 100, has=n % 3) for n in range(400)]
    assert len(allocate(demands, {"node": 400 + 37}).given) == 400


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="job a is there twice"):
        allocate([job("a"), job("a")], {"node": 1})
    with pytest.raises(UsageError, match="the capacity of 'node' is -1"):
        allocate([job("a")], {"node": -1})
    with pytest.raises(UsageError, match="the quota of tenant 't' is -1"):
        allocate([job("a")], {"node": 1}, {"t": -1})
    with pytest.raises(UsageError, match="fairness is 0"):
        allocate([job("a")], {"node": 1}, fairness=0.0)
    with pytest.raises(UsageError, match="0 configurations"):
        Demand("a", ())
    with pytest.raises(UsageError, match="weight nan"):
        job("a", weight=float("nan"))
    for count, goodput in ((0, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(UsageError, match="with goodput"):
            JobConfiguration("node", count, goodput)
