"""Plans which workers of a job share a node. A bundle is a set of resources on one node.

A bundle holds one worker, a group of workers of one role (`per_group`), or the workers of collocated roles that have
the same rank (or group). Roles that must not share a node have a group of bundles of their own, each on another node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from dlrover_hooks.job.spec import Collocation, JobSpec, RoleSpec

_PARTS = 10_000
"""Resources are counted in ten-thousandths, as in Ray."""
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
    apart = {name for group in spec.apart for name in group}
    near = tuple(bundle for bundle in _bundles(spec) if bundle.workers[0][0] not in apart)
    groups = [BundleGroup("near", near)] if near else []
    for names in spec.apart:
        bundles = tuple(bundle for bundle in _bundles(spec) if bundle.workers[0][0] in names)
        name, known = "apart-" + "-".join(names), {one.name for one in groups}
        groups.append(BundleGroup(name if name not in known else f"{name}-{len(groups)}", bundles, spread=True))
    return PlacementPlan(tuple(groups))


def _bundles(spec: JobSpec) -> Iterator[Bundle]:
    roles = {one.name: one for one in spec.roles}
    seen = set[str]()
    for one in spec.roles:
        if one.name in seen:
            continue
        together = next((each for each in spec.collocations if one.name in each.roles), None)
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
        total[spec.device] = next(
            count * _PARTS for count in range(1, len(parts) + devices) if _packed([_PARTS] * count, tuple(parts))
        )
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
            if _packed([_PARTS] * spec.devices_per_node, parts) is None:
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


def _units(amount: float) -> int:
    """The amount in ten-thousandths, rounded down so that equal parts never add up to more than the whole."""
    return math.floor(amount * _PARTS + 1e-6)


def _packed(free: list[int], parts: tuple[int, ...]) -> list[int] | None:
    """What is left of each device of a node after these workers are placed; None: they do not fit.

    Best fit, largest first: whole devices first, then each part on the fullest device that has room for it.
    """
    left = sorted(free)
    for part in sorted(parts, reverse=True):
        whole, rest = divmod(part, _PARTS)
        empty = [at for at, one in enumerate(left) if one == _PARTS]
        if len(empty) < whole:
            return None
        for at in empty[:whole]:
            left[at] = 0
        if rest:
            at = next((at for at, one in enumerate(left) if one >= rest), None)
            if at is None:
                return None
            left[at] -= rest
        left.sort()
    return left


def _fit(demands: list[_Demand], nodes: int, devices: int) -> bool:
    """False: the bundles do not fit the nodes. After `_MOST_STEPS` steps the search gives up and returns True: the
    platform then shows at run time whether they fit."""
    order = sorted((one for one in demands if any(one.parts) or one.apart >= 0), key=lambda one: -sum(one.parts))
    if sum(sum(one.parts) for one in order) > nodes * devices * _PARTS:
        return False
    steps = 0

    def place(at: int, free: list[list[int]], used: list[frozenset[int]]) -> bool:
        nonlocal steps
        steps += 1
        if at == len(order) or steps > _MOST_STEPS:
            return True
        tried = set[tuple[tuple[int, ...], frozenset[int]]]()
        for node in range(nodes):
            like = (tuple(free[node]), used[node])
            if like in tried or order[at].apart in used[node]:
                continue
            tried.add(like)
            left = _packed(free[node], order[at].parts)
            if left is None:
                continue
            apart = used[node] | {order[at].apart} if order[at].apart >= 0 else used[node]
            if place(at + 1, [*free[:node], left, *free[node + 1 :]], [*used[:node], apart, *used[node + 1 :]]):
                return True
        return False

    return place(0, [[_PARTS] * devices for _ in range(nodes)], [frozenset()] * nodes)
