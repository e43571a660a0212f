"""Jobs, nodes and samples for tests of the Brain."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.master.brain.messages import RegisterJob, TimedSample
from dlrover_hooks.protocol import JobSample, NodeResource, NodeSample, NodeType, ResourceLimits

SIZE = NodeResource(cpu=4.0, memory=8192)
LIMITS = ResourceLimits(cpu=128, memory=512 * 1024, max_workers=32, max_ps=8)


def told(name: str = "job", *, limits: ResourceLimits = LIMITS, **more: Any) -> RegisterJob:
    return RegisterJob(name, limits, **more)


def node(kind: NodeType, number: int, cpu: float, memory: int = 4000, size: NodeResource = SIZE) -> NodeSample:
    return NodeSample(f"{kind.value}-{number}", kind, size, cpu, memory)


def sample(
    workers: int = 1, ps: int = 0, *, speed: float = 10.0, ps_cpu: list[float] | None = None, ps_memory: int = 4000,
    worker_cpu: float = 2.0, worker_memory: int = 4000, size: NodeResource = SIZE,
) -> JobSample:  # fmt: skip
    """`ps_cpu`: used cores of each server; by default 2."""
    cores = ps_cpu or [2.0] * ps
    servers = [node(NodeType.PS, number, cpu, ps_memory, size) for number, cpu in enumerate(cores)]
    others = [node(NodeType.WORKER, number, worker_cpu, worker_memory, size) for number in range(workers)]
    return JobSample(speed, (*servers, *others))


def timed(*samples: JobSample, begin: float = 1000.0) -> tuple[TimedSample, ...]:
    return tuple(TimedSample(begin + 15 * number, one) for number, one in enumerate(samples))
