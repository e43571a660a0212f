"""Divides the nodes of a cluster among its jobs: each job gets one of its configurations, or waits.

An integer program in the form of Sia (Jayaram Subramanya et al., SOSP 2023): one binary variable for each job and
configuration, whose cost is a negative power of the goodput. Differs from Sia in the cost of a job that waits, which
grows with the nodes that it needs: a job does not wait only in order that others grow. scipy is imported at the first
call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.scaling.speed_models import scipy_optimize

FAIRNESS = -0.5
"""Power of the goodput, Sia's default. Nearer to 0, slow jobs count as much as fast ones."""
GROWTH = 2
"""A job that runs gets at most so many times its nodes: beyond, its goodput is a guess. As in Sia."""
GAP = 1e-3
"""Distance from the least cost at which the solver stops, relative to the cost of all jobs in their smallest
configurations. It is at most half the weight of a job, so that none waits because of it."""
TIME_LIMIT_S = 5.0


class JobConfiguration(msgspec.Struct, frozen=True):
    """A job on so many nodes of one kind. `goodput`: useful samples per second, in any unit, above 0."""

    kind: str
    nodes: int
    goodput: float

    def __post_init__(self) -> None:
        if self.nodes < 1 or not (math.isfinite(self.goodput) and self.goodput > 0):
            raise UsageError(
                f"configuration: {self.nodes} nodes {self.kind!r} with goodput {self.goodput}",
                hint="give at least 1 node and a finite goodput above 0",
            )


class Demand(msgspec.Struct, frozen=True):
    """A job that runs or waits.

    `current`: kind and number of the nodes that it has; None: it waits. `age_s`: since it was started first.
    `restart_s`: what a change of its nodes costs; 0 with in-process recovery is nearly true.
    """

    job: str
    configurations: tuple[JobConfiguration, ...]
    tenant: str = ""
    weight: float = 1.0
    current: tuple[str, int] | None = None
    age_s: float = 0.0
    restarts: int = 0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.configurations or not (math.isfinite(self.weight) and self.weight > 0):
            raise UsageError(
                f"job {self.job}: {len(self.configurations)} configurations, weight {self.weight}",
                hint="give at least one configuration and a finite weight above 0",
            )


class ClusterAllocation(msgspec.Struct, frozen=True):
    """What each job gets; a job that is not in `given` waits. `optimal`: within `GAP`. False: the time was up."""

    given: dict[str, JobConfiguration]
    optimal: bool


def allocate(
    jobs: Sequence[Demand],
    capacity: Mapping[str, int],
    quotas: Mapping[str, int] | None = None,
    *,
    fairness: float = FAIRNESS,
    time_limit_s: float = TIME_LIMIT_S,
) -> ClusterAllocation:
    """The allocation with the least cost.

    Args:
        jobs: with different names.
        capacity: nodes of each kind.
        quotas: the most nodes, of all kinds, that the jobs of a tenant have together; others have no limit.
        fairness: below 0.
        time_limit_s: for the solver. When it is up, the best allocation found so far is taken; if there is none, jobs
            keep what they have, and others get their smallest configuration as far as it fits.

    Raises `UsageError` for two jobs of one name, a negative capacity or quota, or a fairness of 0 and above;
    `MissingExtra` without scipy.
    """
    _check(jobs, capacity, quotas or {}, fairness)
    columns, costs, all_wait = list[_Column](), list[float](), 0.0
    for demand in jobs:
        offers = _open_to(demand, capacity)
        of_offers = [_cost(demand, one, fairness) for one in offers]
        waiting = max(of_offers, default=0.0) + demand.weight * min(one.nodes for one in demand.configurations)
        all_wait += waiting
        columns += [(demand, one) for one in offers]
        costs += [cost - waiting for cost in of_offers]
    if not columns:
        return ClusterAllocation({}, optimal=True)
    rows = _rows(columns, capacity, quotas or {})
    weights = [demand.weight for demand in jobs]
    gap = min(GAP * sum(weights), 0.5 * min(weights))
    solver = scipy_optimize()
    matrix, most = _sparse(rows, len(columns))
    found = solver.milp(
        np.array(costs),
        integrality=np.ones(len(columns)),
        bounds=solver.Bounds(0, 1),
        constraints=solver.LinearConstraint(matrix, ub=most),
        options={"mip_rel_gap": gap / all_wait, "time_limit": time_limit_s},
    )
    if found.x is None:
        return ClusterAllocation(_kept(columns, rows), optimal=False)
    chosen = (columns[number] for number in np.flatnonzero(found.x > 0.5))
    return ClusterAllocation({demand.job: one for demand, one in chosen}, optimal=found.status == 0)


_Column = tuple[Demand, JobConfiguration]
_Row = tuple[dict[int, float], float]
"""Coefficients by column, and the most that their sum may be."""


def _check(jobs: Sequence[Demand], capacity: Mapping[str, int], quotas: Mapping[str, int], fairness: float) -> None:
    if twice := [name for name, times in Counter(demand.job for demand in jobs).items() if times > 1]:
        raise UsageError(f"allocation: job {twice[0]} is there twice", hint="give each job once")
    for what, amounts in (("capacity of", capacity), ("quota of tenant", quotas)):
        for name, amount in amounts.items():
            if amount < 0:
                raise UsageError(f"allocation: the {what} {name!r} is {amount}", hint="give at least 0")
    if not fairness < 0:
        raise UsageError(f"allocation: fairness is {fairness}", hint="give a power below 0, as -0.5")


def _open_to(demand: Demand, capacity: Mapping[str, int]) -> list[JobConfiguration]:
    """The configurations that the job may get in this round: those that the cluster has nodes for, within `GROWTH`."""
    most = GROWTH * demand.current[1] if demand.current else math.inf
    return [one for one in demand.configurations if one.nodes <= min(most, capacity.get(one.kind, 0))]


def _cost(demand: Demand, one: JobConfiguration, fairness: float) -> float:
    """Goodput counts relative to the job's smallest one: jobs of different models cannot be compared otherwise."""
    least = min(each.goodput for each in demand.configurations)
    moves = demand.current is not None and demand.current != (one.kind, one.nodes)
    return demand.weight * (one.goodput / least * (_restart_factor(demand) if moves else 1.0)) ** fairness


def _restart_factor(demand: Demand) -> float:
    """Sia's estimate of the part of its time that a job keeps which goes on being restarted as often as so far."""
    worked_s = demand.age_s - demand.restarts * demand.restart_s
    whole_s = demand.age_s + demand.restart_s
    return max(worked_s / whole_s, 0.01) if whole_s > 0 else 1.0


def _rows(columns: Sequence[_Column], capacity: Mapping[str, int], quotas: Mapping[str, int]) -> list[_Row]:
    """One configuration a job, the nodes of each kind, the nodes of each tenant."""
    of_job: dict[str, dict[int, float]] = {}
    of_kind: dict[str, dict[int, float]] = {}
    of_tenant: dict[str, dict[int, float]] = {}
    for number, (demand, one) in enumerate(columns):
        of_job.setdefault(demand.job, {})[number] = 1.0
        of_kind.setdefault(one.kind, {})[number] = float(one.nodes)
        if demand.tenant in quotas:
            of_tenant.setdefault(demand.tenant, {})[number] = float(one.nodes)
    return [
        *((row, 1.0) for row in of_job.values()),
        *((row, float(capacity[kind])) for kind, row in of_kind.items()),
        *((row, float(quotas[tenant])) for tenant, row in of_tenant.items()),
    ]


def _sparse(rows: Sequence[_Row], columns: int) -> tuple[Any, Any]:
    from scipy.sparse import csr_array

    where = [(number, column) for number, (row, _) in enumerate(rows) for column in row]
    values = [value for row, _ in rows for value in row.values()]
    matrix = csr_array((values, tuple(np.array(where).T)), shape=(len(rows), columns))
    return matrix, np.array([most for _, most in rows])


def _kept(columns: Sequence[_Column], rows: Sequence[_Row]) -> dict[str, JobConfiguration]:
    """What jobs have, then the smallest configurations, as far as they fit."""
    left, given = [most for _, most in rows], dict[str, JobConfiguration]()

    def order(number: int) -> tuple[bool, int]:
        demand, one = columns[number]
        return demand.current != (one.kind, one.nodes), one.nodes

    for number in sorted(range(len(columns)), key=order):
        demand, one = columns[number]
        if all(row.get(number, 0.0) <= free for (row, _), free in zip(rows, left, strict=True)):
            left = [free - row.get(number, 0.0) for (row, _), free in zip(rows, left, strict=True)]
            given[demand.job] = one
    return given
