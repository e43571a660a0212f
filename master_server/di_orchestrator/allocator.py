"""On which nodes the replicas of preemptible `DIJob`s run. What a `Policy` says is checked before it counts. Pure."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.di_orchestrator.di_job_resource import Priority
from dlrover_hooks.protocol import NodeResource

log = logging.getLogger("dlrover_hooks.operator")
NodeList = tuple[str, ...]
"""The node of each replica, by rank. Empty: the job waits."""


class JobInfo(msgspec.Struct, frozen=True):
    """A job, as a policy sees it.

    Attributes:
        key: `namespace/name`.
        sizes: what each replica requests, by rank, when the job has `replicas`; replicas beyond are like the last one.
        least: fewer replicas than that do not work.
        replicas: so many its user wants.
        submitted_s: when it was submitted, in seconds of one clock for all jobs.
        profilings: what the job has reported: `{"speeds": {"2": 31.5}}` is 31.5 samples per second with 2 replicas.
    """

    key: str
    sizes: tuple[NodeResource, ...]
    least: int = 1
    replicas: int = 1
    preemptible: bool = True
    priority: Priority = Priority.NORMAL
    submitted_s: float = 0.0
    profilings: dict[str, Any] = {}

    def size(self, rank: int) -> NodeResource:
        """What the replica of this rank requests."""
        return self.sizes[min(rank, len(self.sizes) - 1)]


class NodeInfo(msgspec.Struct, frozen=True):
    """A node of the cluster: what it has left for preemptible jobs, as if none of them ran."""

    name: str
    free: NodeResource


class Policy(Protocol):
    """A scheduling algorithm. It is pure: the same arguments, the same answer. What it raises changes no allocation."""

    def allocate(self, job: JobInfo, nodes: Mapping[str, NodeInfo]) -> NodeList:
        """Place a job that was submitted. `nodes`: what other jobs leave."""
        ...

    def optimize(
        self, jobs: Mapping[str, JobInfo], nodes: Mapping[str, NodeInfo], prev_allocations: Mapping[str, NodeList]
    ) -> dict[str, NodeList]:
        """Place all jobs. A job that is not in the answer waits."""
        ...


class Allocator:
    """Schedules one job when it is submitted, and all of them once in each scheduling period.

    Args:
        policy: says where replicas run.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def allocate(
        self, job: JobInfo, nodes: Mapping[str, NodeInfo], others: Mapping[str, tuple[JobInfo, NodeList]]
    ) -> NodeList:
        """Where the replicas of `job` run. Empty: it waits, also because of an error of the policy, which is logged.

        `others`: the preemptible jobs that run, with their allocations. A job that is not preemptible is not scheduled:
        the answer is empty.
        """
        if not job.preemptible:
            return ()
        left = remaining(nodes, others.values())
        try:
            found = tuple(self._policy.allocate(job, left))
            check(job, found, {name: node.free for name, node in left.items()})
        except Exception as error:
            self._failed(f"job {job.key} waits", error)
            return ()
        return found

    def allocate_all(
        self, jobs: Mapping[str, JobInfo], nodes: Mapping[str, NodeInfo], before: Mapping[str, NodeList]
    ) -> dict[str, NodeList]:
        """The allocations of all preemptible jobs. After an error of the policy, which is logged, those of `before`."""
        mine = {key: job for key, job in jobs.items() if job.preemptible}
        kept = {key: before.get(key, ()) for key in mine}
        try:
            found = {key: tuple(one) for key, one in self._policy.optimize(mine, nodes, kept).items()}
            if unknown := sorted(set(found) - set(mine)):
                raise UsageError(f"the policy places job {unknown[0]}, which there is not")
            left = {name: node.free for name, node in nodes.items()}
            for key, one in found.items():
                check(mine[key], one, left)
                for rank, name in enumerate(one):
                    left[name] = less(left[name], mine[key].size(rank))
        except Exception as error:
            self._failed("all jobs keep their nodes", error)
            return kept
        return {key: found.get(key, ()) for key in mine}

    def _failed(self, what: str, error: Exception) -> None:
        log.error("policy %s: %s: %s", type(self._policy).__name__, what, error, exc_info=error)


def check(job: JobInfo, placed: NodeList, free: Mapping[str, NodeResource]) -> None:
    """Raise `UsageError` if the job cannot run there: too few replicas, a missing node, or a node without room."""
    if placed and len(placed) < job.least:
        raise UsageError(f"job {job.key}: {len(placed)} replicas, but it needs {job.least}")
    used = defaultdict[str, list[NodeResource]](list)
    for rank, name in enumerate(placed):
        if name not in free:
            raise UsageError(f"job {job.key}: replica {rank} is placed on node {name!r}, which there is not")
        used[name].append(job.size(rank))
    for name, sizes in used.items():
        if not fits(sizes, free[name]):
            raise UsageError(f"job {job.key}: node {name} has no room for {len(sizes)} of its replicas")


def fits(sizes: list[NodeResource], free: NodeResource) -> bool:
    """Whether all of them together fit."""
    return (
        sum(one.cpu for one in sizes) <= free.cpu + 1e-9
        and sum(one.memory for one in sizes) <= free.memory
        and sum(one.gpu_num for one in sizes) <= free.gpu_num
    )


def less(free: NodeResource, size: NodeResource) -> NodeResource:
    """What is left; nothing is less than 0."""
    return msgspec.structs.replace(
        free, cpu=max(0.0, free.cpu - size.cpu), memory=max(0, free.memory - size.memory),
        gpu_num=max(0, free.gpu_num - size.gpu_num),
    )  # fmt: skip


def remaining(nodes: Mapping[str, NodeInfo], placed: Iterable[tuple[JobInfo, NodeList]]) -> dict[str, NodeInfo]:
    """What jobs leave of the nodes. Those of `placed` that are on nodes that there are not need nothing."""
    left = {name: node.free for name, node in nodes.items()}
    for job, allocation in placed:
        for rank, name in enumerate(allocation):
            if name in left:
                left[name] = less(left[name], job.size(rank))
    return {name: NodeInfo(name, free) for name, free in left.items()}
