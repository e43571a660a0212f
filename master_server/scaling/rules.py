"""The rules that hold before a model has data, and beside it: first sizes, hot servers, used-up memory.

The constants are those of DLRover's local optimizer and of its Brain (2026-08), where nothing else is said. Memory is
in MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dlrover_hooks.protocol import (
    JobSample,
    Node,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeType,
    ResourceLimits,
    ResourcePlan,
)

PS, WORKER = NodeType.PS.value, NodeType.WORKER.value
FIRST_SHARE = 5
"""The first node gets one part of so many of what the job may have."""
FIRST_CPU, FIRST_MEMORY = 16, 8192
"""Most of the first node."""
MAX_CPU, MAX_MEMORY, MAX_MEMORY_STEP = 32, 65536, 8192
"""Most of one node, and most that is added at once after it was killed for memory."""
HOT = 0.9
"""Used by configured cores of a parameter server that is hot."""
EXHAUSTED = 0.95
"""Above it a parameter server slows down the workers: more of these do not pay."""
UNBALANCED = 0.2
"""(max - mean) / max of the servers' memory. Our choice: DLRover's configuration does not state one."""
PS_MEMORY_MARGIN, WORKER_MEMORY_MARGIN = 1.2, 1.5


def first_plan(limits: ResourceLimits, ps: bool) -> ResourcePlan:
    """Nothing is known yet: `min_workers` workers, with `ps` also `min_ps` servers."""
    nodes = limits.min_workers + (limits.min_ps if ps else 0)
    cpu = min(math.ceil(limits.cpu / FIRST_SHARE), FIRST_CPU, limits.cpu / nodes)
    memory = min(math.ceil(limits.memory / FIRST_SHARE), FIRST_MEMORY, limits.memory // nodes)
    resource = NodeResource(cpu=cpu, memory=memory)
    groups = {WORKER: NodeGroupResource(limits.min_workers, resource)}
    return ResourcePlan({PS: NodeGroupResource(limits.min_ps, resource), **groups} if ps else groups)


def worker_resource(samples: Sequence[JobSample]) -> NodeResource:
    """Of one worker: the cores that it uses on average, and its highest memory with a margin."""
    used = [node for sample in samples for node in sample.of(NodeType.WORKER)]
    cpu = max(1.0, round(sum(node.cpu for node in used) / len(used), 1))
    memory = max(1024, math.ceil(WORKER_MEMORY_MARGIN * max(node.memory for node in used)))
    return msgspec.structs.replace(used[-1].config_resource, cpu=min(cpu, MAX_CPU), memory=min(memory, MAX_MEMORY))


def ps_group(samples: Sequence[JobSample], limits: ResourceLimits) -> NodeGroupResource:
    """So many servers as as many workers need as fit into the limits beside them."""
    last = samples[-1]
    workers, servers = last.of(NodeType.WORKER), last.of(NodeType.PS)
    per_worker = sum(node.cpu for sample in samples for node in sample.of(NodeType.PS)) / len(samples) / len(workers)
    worker_cpu = worker_resource(samples).cpu
    most = min(limits.max_workers, limits.cpu / (per_worker + worker_cpu))
    config = servers[0].config_resource
    wanted = most * per_worker / config.cpu if config.cpu else 0
    highest = max(node.memory for sample in samples for node in sample.of(NodeType.PS))
    memory = min(max(1024, math.ceil(PS_MEMORY_MARGIN * highest)), MAX_MEMORY)
    count = min(max(limits.min_ps, math.ceil(round(wanted, 6))), limits.max_ps)
    return NodeGroupResource(count, msgspec.structs.replace(config, memory=memory))


def hot_servers(samples: Sequence[JobSample], limits: ResourceLimits) -> dict[str, NodeResource]:
    """More CPU for the parameter servers, by name, if one of them is hot in all `samples`; by migration.

    All servers are scaled alike, up to what `max_workers` workers need, `MAX_CPU`, and the cores that are left.
    """
    last = samples[-1]
    servers, used = last.of(NodeType.PS), _mean_cpu(samples)
    hot = [node for node in servers if node.config_resource.cpu and used[node.name] >= HOT * node.config_resource.cpu]
    if not hot:
        return {}
    factor = max(1.0, limits.max_workers / max(1, len(last.of(NodeType.WORKER))))
    factor = min([factor, *(MAX_CPU / used[node.name] for node in hot)])
    others = sum(node.config_resource.cpu for node in last.nodes if node.type is not NodeType.PS)
    factor = min(factor, (limits.cpu - others) / max(sum(used.values()), 1e-9))
    wanted = {node.name: math.floor(used[node.name] * factor * 10) / 10 for node in servers}
    return {
        node.name: msgspec.structs.replace(node.config_resource, cpu=wanted[node.name])
        for node in servers
        if wanted[node.name] > node.config_resource.cpu
    }


def after_out_of_memory(
    nodes: Sequence[Node], sample: JobSample | None, limits: ResourceLimits, ps: int, workers: int
) -> ResourcePlan:
    """More memory for what was killed for it; more servers where each has its share or no more memory may be given.

    `ps`, `workers`: how many the job has.
    """
    groups: dict[str, NodeGroupResource] = {}
    single: dict[str, NodeResource] = {}
    servers = [node for node in nodes if node.type is NodeType.PS]
    present = sample.of(NodeType.PS) if sample else []
    more = min(2 * ps, limits.max_ps)
    if servers and more > ps and needs_servers(servers, present):
        config = servers[0].config_resource
        groups[PS] = NodeGroupResource(more, config)
    else:
        single = {node.name: grown for node in servers if (grown := more_memory(node.config_resource))}
    killed = [node.config_resource for node in nodes if node.type is NodeType.WORKER]
    if killed and (grown := more_memory(max(killed, key=lambda one: one.memory))):
        groups[WORKER] = NodeGroupResource(workers, grown)
    return ResourcePlan(groups, single)


def needs_servers(killed: Sequence[Node], present: Sequence[NodeSample]) -> bool:
    """Whether the model is too large for the servers, not the part of one of them too large for it."""
    if max(node.config_resource.memory for node in killed) >= MAX_MEMORY:
        return True
    highest = max((node.memory for node in present), default=0)
    if not highest:
        return False
    mean = sum(node.memory for node in present) / len(present)
    return len(present) > 1 and (highest - mean) / highest <= UNBALANCED


def more_memory(config: NodeResource) -> NodeResource | None:
    """Twice as much, within the bounds. None: it has the most already."""
    memory = min(2 * config.memory, config.memory + MAX_MEMORY_STEP, MAX_MEMORY)
    return msgspec.structs.replace(config, memory=memory) if memory > config.memory else None


def _mean_cpu(samples: Sequence[JobSample]) -> dict[str, float]:
    """Of each server of the last sample, over the samples that have it."""
    used: dict[str, list[float]] = {node.name: [] for node in samples[-1].of(NodeType.PS)}
    for node in (node for sample in samples for node in sample.nodes if node.name in used):
        used[node.name].append(node.cpu)
    return {name: sum(cores) / len(cores) for name, cores in used.items()}
