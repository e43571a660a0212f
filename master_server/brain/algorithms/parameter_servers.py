"""Plans for parameter servers with a problem: one of them has too much to do, or all of them have.

The load is unbalanced if the busiest server is far above the mean. Then that one needs more; otherwise there are too
few servers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.master.brain.algorithms.speeds import optimizer_of
from dlrover_hooks.master.brain.algorithms.workers import killed_workers
from dlrover_hooks.master.brain.records import ClusterView, JobRecord, PastJob, Proposal
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.protocol import (
    JobSample,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeType,
    ResourceLimits,
    ResourcePlan,
)

RECENT = 5
"""Samples whose mean counts."""
SKEWED = 0.2
"""(max - mean) / max, above which the load is unbalanced; that of the memory in `rules.UNBALANCED`."""
MARGIN = 1.2
"""On what is left to an idle server."""
LONG_S = 3600.0
"""Cores are taken away only if the job goes on for so long, as DLRover's Brain does."""


def unbalanced(samples: Sequence[JobSample], of: Callable[[NodeSample], float]) -> bool:
    """Whether the busiest server is far above the mean. One server is never unbalanced."""
    names = [node.name for node in samples[-1].of(NodeType.PS)] if samples else []
    means = [statistics.fmean(of(n) for one in samples for n in one.nodes if n.name == name) for name in names]
    highest = max(means, default=0.0)
    return len(means) > 1 and highest > 0 and (highest - statistics.fmean(means)) / highest > SKEWED


def unbalanced_ps(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """More memory for the servers that were killed for it; otherwise more cores for hot ones, by migration."""
    killed = [node for node in job.oom_nodes if node.type is NodeType.PS]
    if killed:
        grown = {node.name: more for node in killed if (more := rules.more_memory(node.config_resource))}
        plan = ResourcePlan(killed_workers(job, history), grown)
        return Proposal(plan, f"the load is unbalanced: more memory for {', '.join(grown)}") if grown else None
    samples = job.recent(RECENT)
    if not samples or not (hot := rules.hot_servers(samples, job.registration.limits)):
        return None
    return Proposal(
        ResourcePlan(node_resources=hot), f"the load is unbalanced: more cores for {', '.join(sorted(hot))}"
    )


def insufficient_ps(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """More servers: as many as the fitted model says, twice as many while it is not determined.

    Where the limits allow no more, more for each of them.
    """
    limits, samples = job.registration.limits, job.recent(RECENT)
    killed = [node for node in job.oom_nodes if node.type is NodeType.PS]
    servers = samples[-1].of(NodeType.PS) if samples else []
    if not servers:
        return unbalanced_ps(job, history, cluster, config)
    size = max((node.config_resource for node in servers), key=lambda one: (one.cpu, one.memory))
    count = min(2 * len(servers), limits.max_ps, _room(samples[-1], size, limits))
    if not killed and (modelled := _by_model(job, len(servers))) is not None:
        return modelled
    if count <= len(servers):
        return unbalanced_ps(job, history, cluster, config)
    groups = {rules.PS: NodeGroupResource(count, size), **killed_workers(job, history)}
    return Proposal(ResourcePlan(groups), f"all {len(servers)} servers have too much: {count} of them")


def ps_initial(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """So many servers as the workers need that fit into the limits. With an unbalanced load, no more workers count than
    until the busiest server is exhausted.
    """
    samples = job.recent(RECENT)
    if not samples or not samples[-1].of(NodeType.PS):
        return None
    limits = job.registration.limits
    if unbalanced(samples, lambda node: node.cpu):
        busiest = max(node.cpu_share for node in samples[-1].of(NodeType.PS)) or 1.0
        workers = len(samples[-1].of(NodeType.WORKER))
        most = max(limits.min_workers, min(limits.max_workers, math.ceil(workers / busiest)))
        limits = msgspec.structs.replace(limits, max_workers=most)
    group = rules.ps_group(samples, limits)
    return Proposal(ResourcePlan({rules.PS: group}), f"{group.count} servers for up to {limits.max_workers} workers")


def idle_ps(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """Fewer cores for servers that use few of them, if jobs like this one go on for an hour."""
    samples = job.recent(RECENT)
    if not samples or not history or statistics.median(past.seconds for past in history) - job.age_s < LONG_S:
        return None
    smaller = dict[str, NodeResource]()
    for node in samples[-1].of(NodeType.PS):
        used = max(one.cpu for sample in samples for one in sample.nodes if one.name == node.name)
        cpu = max(1, math.ceil(MARGIN * used))
        if cpu < node.config_resource.cpu:
            smaller[node.name] = msgspec.structs.replace(node.config_resource, cpu=cpu)
    if not smaller:
        return None
    return Proposal(ResourcePlan(node_resources=smaller), f"{len(smaller)} servers do not use their cores")


def _room(sample: JobSample, size: NodeResource, limits: ResourceLimits) -> int:
    """Servers of this size that fit beside the other nodes."""
    others = [node.config_resource for node in sample.nodes if node.type is not NodeType.PS]
    cpu = limits.cpu - sum(one.cpu for one in others)
    memory = limits.memory - sum(one.memory for one in others)
    fits = [cpu / size.cpu if size.cpu else math.inf, memory / size.memory if size.memory else math.inf]
    return math.floor(min(*fits, limits.max_ps))


def _by_model(job: JobRecord, servers: int) -> Proposal | None:
    """The plan of the fitted model, if it has more servers."""
    optimizer = optimizer_of(job)
    plan = optimizer.generate_resource_plan_with_optimizer()
    group = plan.node_group_resources.get(rules.PS)
    if group is None or group.count <= servers:
        return None
    workers = plan.node_group_resources.get(rules.WORKER)
    counts = (group.count, workers.count if workers else len(job.samples[-1].of(NodeType.WORKER)))
    return Proposal(plan, f"too few servers: {counts[0]} by the fitted model", optimizer.speeds().get(counts))
