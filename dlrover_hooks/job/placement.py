"""Where the workers of a job go, relative to each other: bundles of resources, each of which is on one node.

A bundle holds one worker, a group of workers of one role (`per_group`), or those of all collocated roles with one rank.
Roles that are to stay apart have their bundles in a placement group of their own, each on another node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from dlrover_hooks.job.spec import Collocation, JobSpec, RoleSpec

_PARTS = 10_000
"""Resources are compared in ten-thousandths, as Ray counts them."""


class Bundle(msgspec.Struct, frozen=True):
    """Resources on one node, and the workers that use them: (role, rank)."""

    resources: dict[str, float]
    workers: tuple[tuple[str, int], ...]


class BundleGroup(msgspec.Struct, frozen=True):
    """Bundles that are reserved together. `spread`: each on another node; else as near to each other as possible."""

    name: str
    bundles: tuple[Bundle, ...]
    spread: bool = False


class WorkerSlot(msgspec.Struct, frozen=True):
    """The bundle of a worker, and what it uses of it."""

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
    """The resources of one worker by the platform's names. `share`: of a device, instead of its own."""
    need = role.resources
    devices = need.device if share is None else share
    amounts = {"CPU": need.cpu, device: devices, "memory": need.memory_gb * 1e9, "disk": need.disk_gb * 1e9}
    if device == "CPU":
        amounts["CPU"] = need.cpu
    return {name: amount for name, amount in (amounts | need.custom).items() if amount}


def planned(spec: JobSpec) -> PlacementPlan:
    """The plan of a job that was checked."""
    apart = {name for group in spec.apart for name in group}
    near = tuple(bundle for bundle in _bundles(spec) if bundle.workers[0][0] not in apart)
    groups = [BundleGroup("near", near)] if near else []
    for names in spec.apart:
        bundles = tuple(bundle for bundle in _bundles(spec) if bundle.workers[0][0] in names)
        groups.append(BundleGroup("apart-" + "-".join(names), bundles, spread=True))
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
    total, workers = dict[str, int](), list[tuple[str, int]]()
    for role in roles:
        share = together.share.get(role.name) if together is not None else None
        for rank in range(group * role.per_group, (group + 1) * role.per_group):
            workers.append((role.name, rank))
            for name, amount in needed(role, spec.device, share).items():
                total[name] = total.get(name, 0) + round(amount * _PARTS)
    resources = {name: amount / _PARTS for name, amount in total.items()}
    return Bundle(resources or {"CPU": 0.001}, tuple(workers))


def find_misfits(spec: JobSpec) -> list[str]:
    """What of the plan does not fit the nodes that the job says it has."""
    found, plan = list[str](), planned(spec)
    for group in plan.groups:
        if group.spread and len(group.bundles) > spec.nodes:
            names = group.name.removeprefix("apart-").replace("-", ", ")
            found.append(
                f"spread(): {len(group.bundles)} workers of {names} are each to be on another node, but there are "
                f"nodes({spec.nodes})"
            )
    if not spec.devices_per_node or spec.device == "CPU":
        return found
    bundles = [bundle for group in plan.groups for bundle in group.bundles]
    sizes = [bundle.resources.get(spec.device, 0.0) for bundle in bundles]
    for bundle, size in zip(bundles, sizes, strict=True):
        if size > spec.devices_per_node:
            workers = ", ".join(f"{role} {rank}" for role, rank in bundle.workers)
            found.append(f"{workers} need {size:g} devices on one node, which has {spec.devices_per_node}")
    if not found and (short := _too_few(sizes, spec.nodes, spec.devices_per_node)):
        found.append(short)
    return found


def _too_few(sizes: list[float], nodes: int, devices: int) -> str:
    """Why bundles of `sizes` do not fit `nodes` nodes; empty: they do. A part of a device lies on one device."""
    free = [[1.0] * devices for _ in range(nodes)]
    for size in sorted(sizes, reverse=True):
        if not any(_take(node, size) for node in free):
            total = math.fsum(sizes)
            return f"the workers need {total:g} devices, which {nodes} nodes with {devices} devices each cannot hold"
    return ""


def _take(node: list[float], size: float) -> bool:
    whole, part = int(size), size - int(size)
    empty = [at for at, left in enumerate(node) if left == 1.0]
    if len(empty) < whole:
        return False
    after = list(node)
    for at in empty[:whole]:
        after[at] = 0.0
    if part > 1 / _PARTS:
        fits = [left for left in after if left + 1 / _PARTS >= part]
        if not fits:
            return False
        at = after.index(min(fits))
        after[at] -= part
    node[:] = after
    return True
