"""Plans which workers of a job share a node. A bundle is a set of resources on one node.

A bundle holds one worker, a group of workers of one role (`per_group`), or the workers of collocated roles that have
the same rank (or group). Roles that must not share a node have a group of bundles of their own, each on another node.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from dlrover_hooks.job.spec import Collocation, JobSpec, RoleSpec

_PARTS = 10_000
"""Resources are counted in ten-thousandths, as in Ray."""
RESOLUTION = 1 / _PARTS
"""The smallest part of a resource."""
_MOST_STEPS = 20_000


class Bundle(msgspec.Struct, frozen=True):
    """Resources on one node, and the workers that use them: (role, rank)."""

    resources: dict[str, float]
    workers: tuple[tuple[str, int], ...]


class BundleGroup(msgspec.Struct, frozen=True):
    """Bundles that are reserved together. `spread`: all on different nodes; else as close together as possible."""

    name: str
    bundles: tuple[Bundle, ...]
    spread: bool = False


class WorkerSlot(msgspec.Struct, frozen=True):
    """Where a worker is placed: number of the group, number of the bundle in it, and the resources it uses there."""

    group: int
    bundle: int
    resources: dict[str, float]


class PlacementPlan(msgspec.Struct, frozen=True):
    """All groups of bundles of a job."""

    groups: tuple[BundleGroup, ...]

    def slots(self, spec: JobSpec) -> dict[tuple[str, int], WorkerSlot]:
        """The slot of each worker, by role and rank."""
        roles = {one.name: one for one in spec.roles}
        shares = {name: one.share[name] for one in spec.collocations for name in one.share}
        found = dict[tuple[str, int], WorkerSlot]()
        for number, group in enumerate(self.groups):
            for index, bundle in enumerate(group.bundles):
                for role, rank in bundle.workers:
                    found[role, rank] = WorkerSlot(number, index, needed(roles[role], spec.device, shares.get(role)))
        return found


def needed(role: RoleSpec, device: str, share: float | None = None) -> dict[str, float]:
    """The resources of one worker by Ray's names. `share`: its part of a shared device, instead of its own devices."""
    need = role.resources
    devices = need.device if share is None else share
    amounts = {"CPU": need.cpu, device: devices, "memory": need.memory_gb * 1e9, "disk": need.disk_gb * 1e9}
    if device == "CPU":
        amounts["CPU"] = need.cpu
    return {name: _units(amount) / _PARTS for name, amount in (amounts | need.custom).items() if amount}


def planned(spec: JobSpec) -> PlacementPlan:
    """The plan of a job. The job must have passed the other checks of `find_problems`."""
    sets = {name: number for number, names in enumerate(spec.apart) for name in names}
    near, apart = list[Bundle](), [list[Bundle]() for _ in spec.apart]
    for bundle in _bundles(spec):
        number = sets.get(bundle.workers[0][0])
        (near if number is None else apart[number]).append(bundle)
    groups = [BundleGroup("near", tuple(near))] if near else []
    known = {one.name for one in groups}
    for names, bundles in zip(spec.apart, apart, strict=True):
        name = "apart-" + "-".join(names)
        groups.append(BundleGroup(name if name not in known else f"{name}-{len(groups)}", tuple(bundles), spread=True))
        known.add(groups[-1].name)
    return PlacementPlan(tuple(groups))


def _bundles(spec: JobSpec) -> Iterator[Bundle]:
    roles = {one.name: one for one in spec.roles}
    collocated = {name: one for one in spec.collocations for name in one.roles}
    seen = set[str]()
    for one in spec.roles:
        if one.name in seen:
            continue
        together = collocated.get(one.name)
        names = together.roles if together is not None else (one.name,)
        seen |= set(names)
        for group in range(one.workers // one.per_group):
            yield _bundle(spec, [roles[name] for name in names], together, group)


def _bundle(spec: JobSpec, roles: list[RoleSpec], together: Collocation | None, group: int) -> Bundle:
    total, workers, parts = dict[str, int](), list[tuple[str, int]](), list[int]()
    for role in roles:
        share = together.share.get(role.name) if together is not None else None
        for rank in range(group * role.per_group, (group + 1) * role.per_group):
            workers.append((role.name, rank))
            for name, amount in needed(role, spec.device, share).items():
                total[name] = total.get(name, 0) + _units(amount)
                if name == spec.device:
                    parts.append(_units(amount))
    if (
        devices := total.get(spec.device, 0)
    ) > _PARTS and devices % _PARTS:  # above one, Ray reserves whole devices only
        total[spec.device] = _devices_for(tuple(parts)) * _PARTS
    resources = {name: amount / _PARTS for name, amount in total.items()}
    return Bundle(resources or {"CPU": 0.001}, tuple(workers))


def find_misfits(spec: JobSpec) -> list[str]:
    """Why the plan does not fit `spec.nodes` and `spec.devices_per_node`, as sentences; empty: it fits."""
    found, plan = list[str](), planned(spec)
    for group in plan.groups:
        if group.spread and len(group.bundles) > spec.nodes:
            names = ", ".join(dict.fromkeys(role for bundle in group.bundles for role, _ in bundle.workers))
            found.append(
                f"spread(): {len(group.bundles)} workers of {names} are each to be on another node, but there are "
                f"nodes({spec.nodes})"
            )
    if not spec.devices_per_node or spec.device == "CPU":
        return found
    slots = plan.slots(spec)
    demands = list[_Demand]()
    for number, group in enumerate(plan.groups):
        for bundle in group.bundles:
            parts = tuple(_units(slots[worker].resources.get(spec.device, 0.0)) for worker in bundle.workers)
            demands.append(_Demand(parts, number if group.spread else -1))
            if _packed(_Free(spec.devices_per_node), parts) is None:
                workers = ", ".join(f"{role} {rank}" for role, rank in bundle.workers)
                size = sum(parts) / _PARTS
                whole = "" if size > spec.devices_per_node else ", each of them a part of one device"
                found.append(f"{workers} need {size:g} devices on one node{whole}, which has {spec.devices_per_node}")
    if not found and not _fit(demands, spec.nodes, spec.devices_per_node):
        total = sum(sum(one.parts) for one in demands) / _PARTS
        found.append(
            f"the workers need {total:g} devices, which {spec.nodes} nodes with {spec.devices_per_node} devices each "
            "cannot hold"
        )
    return found


class _Demand(NamedTuple):
    """Devices of a bundle, in units, by worker. Bundles with equal `apart` must be on different nodes; -1: no rule."""

    parts: tuple[int, ...]
    apart: int

    @property
    def room(self) -> int:
        """A node with less `_Free.room` than this cannot hold it."""
        return sum(part // _PARTS for part in self.parts) * _PARTS or max(self.parts)


def _units(amount: float) -> int:
    """The amount in ten-thousandths, rounded down so that equal parts never add up to more than the whole."""
    return math.floor(amount * _PARTS + 1e-6)


class _Free(NamedTuple):
    """Devices of a node: how many are whole, and what is left of each used one, in units, sorted. Without full ones."""

    whole: int
    left: tuple[int, ...] = ()

    @property
    def room(self) -> int:
        """The whole devices, in units; without any, what is left of the emptiest one. See `_Demand.room`."""
        return self.whole * _PARTS or (self.left[-1] if self.left else 0)


def _packed(free: _Free, parts: tuple[int, ...]) -> _Free | None:
    """What is left of the devices of a node after these workers are placed; None: they do not fit.

    Best fit, largest first: whole devices first, then each part on the fullest device that has room for it.
    """
    whole, left = free.whole, list(free.left)
    for part in sorted(parts, reverse=True):
        devices, rest = divmod(part, _PARTS)
        whole -= devices
        if rest:
            at = bisect_left(left, rest)
            whole -= at == len(left)
            unused = (left.pop(at) if at < len(left) else _PARTS) - rest
            if unused:
                insort(left, unused)
        if whole < 0:
            return None
    return _Free(whole, tuple(left))


def _devices_for(parts: tuple[int, ...]) -> int:
    """The least number of devices that these workers fit, by the rule of `_packed`: it uses a whole device only if no
    used one has room, so what it does not use of many devices is not needed."""
    many = sum(part // _PARTS + 1 for part in parts)
    packed = _packed(_Free(many), parts)
    return many - packed.whole if packed is not None else many


class _Node(NamedTuple):
    """A node in the search. Nodes that are equal are interchangeable. `used`: the `apart` of the bundles on it."""

    free: _Free
    used: frozenset[int]

    def after(self, demand: _Demand) -> _Node | None:
        """This node with a further bundle; None: it does not fit."""
        free = None if demand.apart in self.used else _packed(self.free, demand.parts)
        if free is None:
            return None
        return _Node(free, self.used | {demand.apart} if demand.apart >= 0 else self.used)


class _Nodes:
    """The nodes in the search, sorted by `_Free.room`. Of equal nodes only the number is stored."""

    def __init__(self, node: _Node, count: int) -> None:
        self._counts, self._serials, self._next = {node: count}, {node: 0}, 1
        self._sorted = [(node.free.room, 0, node)]

    def with_room(self, room: int) -> Iterator[_Node]:
        """One of each kind of node that has so much room, the one with the least room first."""
        for at in range(bisect_left(self._sorted, (room,)), len(self._sorted)):
            yield self._sorted[at][2]

    def exchange(self, old: _Node, new: _Node) -> None:
        """Replace a node."""
        self._counts[old] -= 1
        if not self._counts[old]:
            del self._counts[old]
            del self._sorted[bisect_left(self._sorted, (old.free.room, self._serials.pop(old)))]
        if new not in self._counts:
            self._counts[new], self._serials[new] = 0, self._next
            insort(self._sorted, (new.free.room, self._next, new))
            self._next += 1
        self._counts[new] += 1


class _Choice:
    """The place of a bundle in the search. Of equal nodes one is tried."""

    __slots__ = ("_demand", "_made", "_tried")

    def __init__(self, demand: _Demand) -> None:
        self._demand, self._tried = demand, set[_Node]()
        self._made: tuple[_Node, _Node] | None = None

    def next(self, nodes: _Nodes) -> bool:
        """Undo the present choice and make the next one; False: there is none."""
        if self._made is not None:
            nodes.exchange(self._made[1], self._made[0])
        self._made = None
        for node in nodes.with_room(self._demand.room):
            if node in self._tried or (after := node.after(self._demand)) is None:
                continue
            self._tried.add(node)
            self._made = (node, after)
            nodes.exchange(node, after)
            return True
        return False


def _fit(demands: list[_Demand], nodes: int, devices: int) -> bool:
    """False: the bundles do not fit the nodes. After `_MOST_STEPS` steps the search gives up and returns True: the
    platform then shows at run time whether they fit."""
    order = sorted((one for one in demands if any(one.parts) or one.apart >= 0), key=lambda one: -sum(one.parts))
    if sum(sum(one.parts) for one in order) > nodes * devices * _PARTS:
        return False
    like, choices, steps = _Nodes(_Node(_Free(devices), frozenset()), nodes), list[_Choice](), 1
    while len(choices) < len(order) and steps <= _MOST_STEPS:
        choices.append(_Choice(order[len(choices)]))
        while not choices[-1].next(like):
            choices.pop()
            if not choices:
                return False
        steps += 1
    return True
