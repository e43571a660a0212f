"""Plans for workers: their first real size, and after they were killed for memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.master.brain.records import ClusterView, JobRecord, PastJob, Proposal
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.protocol import NodeGroupResource, NodeType, ResourcePlan

RECENT = 5
"""Samples whose use counts."""
MEMORY_MARGIN = 1.6
"""On the highest memory of finished jobs, as DLRover's Brain."""


def workers_initial(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """The cores and the memory that the workers really use, and what those of finished jobs needed."""
    samples = job.recent(RECENT)
    workers = samples[-1].of(NodeType.WORKER) if samples else []
    if not workers:
        return None
    size = rules.worker_resource(samples)
    size = msgspec.structs.replace(size, memory=max(size.memory, min(_past_memory(history), rules.MAX_MEMORY)))
    if all(node.config_resource == size for node in workers):
        return Proposal(ResourcePlan(), "its workers have what they need")
    plan = ResourcePlan({rules.WORKER: NodeGroupResource(len(workers), size)})
    return Proposal(plan, f"its workers use {size.cpu:g} cores and at most {size.memory} MiB with a margin")


def oom_worker(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """More memory for all workers after one was killed for it."""
    groups = killed_workers(job, history)
    if not groups:
        return None
    memory = groups[rules.WORKER].node_resource.memory
    return Proposal(ResourcePlan(groups), f"a worker was killed for memory: {memory} MiB")


def killed_workers(job: JobRecord, history: Sequence[PastJob]) -> dict[str, NodeGroupResource]:
    """Twice the memory, at most 8 GiB more; or what finished jobs needed, if that is more. Empty: no worker was killed,
    or it has the most already.
    """
    killed = [node.config_resource for node in job.oom_nodes if node.type is NodeType.WORKER]
    if not killed or (grown := rules.more_memory(max(killed, key=lambda one: one.memory))) is None:
        return {}
    workers = len(job.samples[-1].of(NodeType.WORKER)) if job.samples else job.registration.limits.min_workers
    memory = max(grown.memory, min(_past_memory(history), rules.MAX_MEMORY))
    return {rules.WORKER: NodeGroupResource(workers, msgspec.structs.replace(grown, memory=memory))}


def _past_memory(history: Sequence[PastJob]) -> int:
    used = [past.usage[rules.WORKER].memory for past in history if rules.WORKER in past.usage]
    return round(MEMORY_MARGIN * max(used, default=0))
