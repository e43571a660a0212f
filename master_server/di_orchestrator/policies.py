"""The scheduling policies that come with the allocator. Pure."""

from __future__ import annotations

import bisect
import enum
import math
from collections import Counter
from collections.abc import Mapping

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.di_orchestrator.allocator import JobInfo, NodeInfo, NodeList
from dlrover_hooks.master.di_orchestrator.di_job_resource import Priority
from dlrover_hooks.master.scaling.allocation import FAIRNESS, Demand, JobConfiguration, allocate
from dlrover_hooks.protocol import NodeResource

_UNIT_CPU = 1.0
"""Jobs of replicas of different sizes are compared in units of so many cores."""
_Amounts = tuple[int, ...]
_STEP = 1.25
"""Between two numbers of replicas of a job that are considered, above 4."""
_HIGH_WEIGHT = 4.0
"""A job of high priority counts as so many others."""


class Placement(enum.Enum):
    """Replicas on as many nodes as possible, or on as few."""

    SPREAD = "spread"
    PACK = "pack"


class FitPolicy:
    """First fit by free resources: jobs of high priority first, then in the order in which they were submitted.

    A job keeps the nodes that it has while they have room for it. It gets what its user wants, or as much of it as
    fits; less than it needs is nothing.

    Args:
        placement: which node of those with room a replica gets.
    """

    def __init__(self, placement: Placement = Placement.PACK) -> None:
        self.placement = placement

    def allocate(self, job: JobInfo, nodes: Mapping[str, NodeInfo]) -> NodeList:
        """See `Policy`."""
        return self._place(job, job.replicas, FreeNodes(nodes), ())

    def optimize(
        self, jobs: Mapping[str, JobInfo], nodes: Mapping[str, NodeInfo], prev_allocations: Mapping[str, NodeList]
    ) -> dict[str, NodeList]:
        """See `Policy`."""
        return self.place_all(jobs, {key: job.replicas for key, job in jobs.items()}, nodes, prev_allocations)

    def place_all(
        self, jobs: Mapping[str, JobInfo], wanted: Mapping[str, int], nodes: Mapping[str, NodeInfo],
        before: Mapping[str, NodeList],
    ) -> dict[str, NodeList]:  # fmt: skip
        """Each job with up to `wanted` replicas, beginning with those that it has on nodes of `before`."""
        free = FreeNodes(nodes)
        placed = {job.key: self._place(job, wanted[job.key], free, before.get(job.key, ())) for job in _in_order(jobs)}
        return {key: one for key, one in placed.items() if one}

    def _place(self, job: JobInfo, most: int, free: FreeNodes, before: NodeList) -> NodeList:
        """Up to `most` replicas, taken from `free`; empty if fewer than the job needs fit."""
        used, placed = Counter[str](), list[str]()
        for rank in range(most):
            size = job.size(rank)
            name = before[rank] if rank < len(before) and free.has_room(before[rank], size) else None
            name = name or free.pick(size, used, self.placement)
            if name is None:
                break
            free.take(name, size)
            used[name] += 1
            placed.append(name)
        if len(placed) >= max(1, job.least):
            return tuple(placed)
        for rank, name in enumerate(placed):
            free.give(name, job.size(rank))
        return ()


class FreeNodes:
    """What nodes have left. Nodes that have the same left are looked at together: most nodes of a cluster do."""

    def __init__(self, nodes: Mapping[str, NodeInfo]) -> None:
        self._free = {name: _amounts(nodes[name].free) for name in sorted(nodes)}
        self._with = dict[_Amounts, dict[str, None]]()
        """Names in the order in which they came, by what they have left."""
        for name, left in self._free.items():
            self._with.setdefault(left, {})[name] = None
        self._sorted = sorted(self._with)

    def has_room(self, name: str, size: NodeResource) -> bool:
        """Whether there is such a node, with so much left."""
        return name in self._free and _fits(_amounts(size), self._free[name])

    def take(self, name: str, size: NodeResource) -> None:
        """The node has so much less."""
        self._add(name, size, -1)

    def give(self, name: str, size: NodeResource) -> None:
        """The node has so much more."""
        self._add(name, size, 1)

    def pick(self, size: NodeResource, used: Mapping[str, int], placement: Placement) -> str | None:
        """A node for a replica of a job that has so many on the nodes of `used`; None: no node has room."""
        if placement is Placement.PACK and used:
            mine = [name for name in used if self.has_room(name, size)]
            if mine:
                return max(mine, key=lambda name: used[name])
        wanted = _amounts(size)
        least = bisect.bisect_left(self._sorted, wanted)
        rest = range(least, len(self._sorted))
        for number in rest if placement is Placement.PACK else reversed(rest):
            left = self._sorted[number]
            if _fits(wanted, left):
                name = next((name for name in self._with[left] if name not in used), None)
                if name is not None:
                    return name
        return min((name for name in used if self.has_room(name, size)), key=lambda name: used[name], default=None)

    def _add(self, name: str, size: NodeResource, sign: int) -> None:
        before = self._free[name]
        left = tuple(have + sign * change for have, change in zip(before, _amounts(size), strict=True))
        same = self._with[before]
        del same[name]
        if not same:
            del self._with[before]
            del self._sorted[bisect.bisect_left(self._sorted, before)]
        self._free[name] = left
        if left not in self._with:
            self._with[left] = {}
            bisect.insort(self._sorted, left)
        self._with[left][name] = None


class GoodputPolicy:
    """All jobs together get the numbers of replicas with the best goodput, fairly: the integer program of the Brain.

    A job says by its profilings how fast it is with so many replicas; see `JobInfo`. A job that has reported nothing is
    taken to grow with its replicas, and gets at most what its user wants. Raises `MissingExtra` without scipy.

    Args:
        fairness: see `scaling.allocation`.
        placement: as for `FitPolicy`, which places the numbers that are found.
    """

    def __init__(self, fairness: float = FAIRNESS, placement: Placement = Placement.PACK) -> None:
        self._fairness, self._fit = fairness, FitPolicy(placement)

    def allocate(self, job: JobInfo, nodes: Mapping[str, NodeInfo]) -> NodeList:
        """See `Policy`: as `FitPolicy`, since the other jobs keep what they have."""
        return self._fit.allocate(job, nodes)

    def optimize(
        self, jobs: Mapping[str, JobInfo], nodes: Mapping[str, NodeInfo], prev_allocations: Mapping[str, NodeList]
    ) -> dict[str, NodeList]:
        """See `Policy`."""
        if not jobs:
            return {}
        capacity = math.floor(sum(node.free.cpu for node in nodes.values()) / _UNIT_CPU)
        has = {key: len(prev_allocations.get(key, ())) for key in jobs}
        offers = {key: _configurations(job, has[key]) for key, job in jobs.items()}
        demands = [_demand(job, offers[key], has[key]) for key, job in jobs.items()]
        found = allocate(demands, {"": capacity}, fairness=self._fairness)
        numbers = {(key, one.nodes): count for key, of_job in offers.items() for count, one in of_job.items()}
        wanted = {key: numbers[key, found.given[key].nodes] if key in found.given else 0 for key in jobs}
        return self._fit.place_all(jobs, wanted, nodes, prev_allocations)


def _in_order(jobs: Mapping[str, JobInfo]) -> list[JobInfo]:
    """Jobs of high priority first, then by submission."""
    return sorted(jobs.values(), key=lambda job: (job.priority is not Priority.HIGH, job.submitted_s, job.key))


def _amounts(size: NodeResource) -> _Amounts:
    """The scarcest first: GPUs, then cores, then memory. Cores in thousandths, so that sums are exact."""
    return size.gpu_num, round(size.cpu * 1000), size.memory


def _fits(size: _Amounts, left: _Amounts) -> bool:
    return size[0] <= left[0] and size[1] <= left[1] and size[2] <= left[2]


def speeds(profilings: Mapping[str, object]) -> dict[int, float]:
    """Samples per second by the number of replicas. Raises `UsageError` if they are no such numbers."""
    given = profilings.get("speeds") or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"profilings.speeds is {given!r}", hint='give an object such as {"2": 31.5}')
    found = dict[int, float]()
    for number, speed in given.items():
        if not str(number).isdecimal() or not isinstance(speed, int | float) or not 0 < speed < math.inf:
            raise UsageError(f"profilings.speeds: {number!r}: {speed!r}", hint='give numbers such as {"2": 31.5}')
        if int(number):
            found[int(number)] = float(speed)
    return found


def _demand(job: JobInfo, offers: Mapping[int, JobConfiguration], replicas: int) -> Demand:
    current = offers.get(replicas)
    return Demand(
        job.key, tuple(offers.values()), current=("", current.nodes) if current else None,
        weight=_HIGH_WEIGHT if job.priority is Priority.HIGH else 1.0,
    )  # fmt: skip


def _configurations(job: JobInfo, replicas: int) -> dict[int, JobConfiguration]:
    """By the number of replicas; `nodes` is their size in units. `replicas`: that the job has.

    Of large numbers only some: the program is solved in a fraction of the time, and a job gains little by one replica
    more of many.
    """
    most = max(job.replicas, job.least)
    known, found, units, following = _known_speeds(job), dict[int, JobConfiguration](), 0.0, job.least
    for count in range(1, most + 1):
        units += max(job.size(count - 1).cpu, _UNIT_CPU) / _UNIT_CPU
        if count >= job.least and (count >= following or count in (replicas, most)):
            found[count] = JobConfiguration("", math.ceil(units), _speed(known, count))
            following = max(count + 1, math.ceil(count * _STEP))
    return found


def _known_speeds(job: JobInfo) -> dict[int, float]:
    """What the job has reported; nothing, if that cannot be read."""
    try:
        return speeds(job.profilings)
    except UsageError:
        return {}


def _speed(known: Mapping[int, float], count: int) -> float:
    """By what was measured: between two numbers on the line, beyond the largest as its speed for each replica."""
    if not known:
        return float(count)
    if count in known:
        return known[count]
    below, above = [n for n in known if n < count], [n for n in known if n > count]
    if not below or not above:
        nearest = max(below) if below else min(above)
        return known[nearest] * count / nearest
    low, high = max(below), min(above)
    return known[low] + (known[high] - known[low]) * (count - low) / (high - low)
