"""The first plan of a job: from finished jobs that are like it, or from its limits alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.master.brain.records import ClusterView, JobRecord, NodeUsage, PastJob, Proposal
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.protocol import NodeGroupResource, ResourceLimits, ResourcePlan

PS_CPU_MARGIN = 0.5
"""Cores added to those of the busiest server. This and the next five as DLRover's Brain."""
PS_COUNT_MARGIN = 1.5
PS_MEMORY_MARGIN = 1.2
WORKER_MEMORY_MARGIN = 1.6
LEAST_CPU, LEAST_MEMORY = 1.0, 1024


def first_plan(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """A share of the limits: nothing is known."""
    plan = rules.first_plan(job.registration.limits, job.registration.ps)
    return Proposal(plan, "no finished job is like it: a share of its limits")


def plan_from_history(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """What finished jobs really used. None without such jobs, or if they do not fit the limits."""
    limits, wanted = job.registration.limits, job.registration.ps
    alike = [past for past in history if rules.WORKER in past.usage and (rules.PS in past.usage) == wanted]
    if not alike:
        return None
    groups = {rules.WORKER: _workers([past.usage[rules.WORKER] for past in alike], limits)}
    if wanted:
        groups[rules.PS] = _servers([past.usage[rules.PS] for past in alike], limits)
    fitted = _within(groups, limits)
    if fitted is None:
        return None
    speed = statistics.median(past.speed for past in alike)
    return Proposal(ResourcePlan(fitted), f"from {len(alike)} finished jobs like it", speed or None)


def _servers(past: Sequence[NodeUsage], limits: ResourceLimits) -> NodeGroupResource:
    """So many as the cores that all servers used need, each as large as the busiest one."""
    total = statistics.median(usage.total_cpu for usage in past)
    cpu = min(max(LEAST_CPU, max(usage.busiest_cpu for usage in past) + PS_CPU_MARGIN), rules.MAX_CPU)
    count = min(max(limits.min_ps, math.ceil(PS_COUNT_MARGIN * total / cpu)), limits.max_ps)
    share = max(math.ceil(usage.total_memory / count) for usage in past)
    memory = PS_MEMORY_MARGIN * max(share, *(usage.memory for usage in past), 1)
    return NodeGroupResource(count, _sized(past[0], cpu, memory))


def _workers(past: Sequence[NodeUsage], limits: ResourceLimits) -> NodeGroupResource:
    """So many as such jobs had at their end: plans have led them there."""
    count = round(statistics.median(usage.count for usage in past))
    count = min(max(count, limits.min_workers), limits.max_workers)
    cpu = min(max(LEAST_CPU, max(usage.cpu for usage in past)), rules.MAX_CPU)
    return NodeGroupResource(count, _sized(past[0], cpu, WORKER_MEMORY_MARGIN * max(usage.memory for usage in past)))


def _sized(usage: NodeUsage, cpu: float, memory: float) -> Any:
    mib = min(max(LEAST_MEMORY, math.ceil(memory)), rules.MAX_MEMORY)
    return msgspec.structs.replace(usage.resource, cpu=round(cpu, 1), memory=mib)


def _within(groups: dict[str, NodeGroupResource], limits: ResourceLimits) -> dict[str, NodeGroupResource] | None:
    """With fewer workers, if the limits need that. None: they do not hold with `min_workers`."""
    servers, workers = groups.get(rules.PS, NodeGroupResource()), groups[rules.WORKER]
    each = workers.node_resource
    cpu = limits.cpu - servers.count * servers.node_resource.cpu
    memory = limits.memory - servers.count * servers.node_resource.memory
    count = min(workers.count, math.floor(cpu / each.cpu), memory // each.memory)
    if count < limits.min_workers:
        return None
    return {**groups, rules.WORKER: NodeGroupResource(count, each)}
