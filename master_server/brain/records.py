"""What an algorithm is told of its job, of finished jobs and of the cluster, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.master.brain.messages import RegisterJob
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import JobSample, Message, Node, NodeResource, NodeType, ResourcePlan


class SpeedPoint(Message, frozen=True):
    """A job with so many servers and workers needs `units` (cores, or GPUs), and makes `speed` steps per second."""

    units: int
    ps: int
    workers: int
    speed: float


class JobRecord(Message, frozen=True):
    """The job that is planned. `samples`: the newest ones of each of its configurations, the oldest first."""

    registration: RegisterJob
    stage: OptimizeStage
    samples: tuple[JobSample, ...] = ()
    oom_nodes: tuple[Node, ...] = ()
    age_s: float = 0.0

    def recent(self, count: int) -> list[JobSample]:
        """The last samples with the nodes that the job has now, at most `count`."""
        found: list[JobSample] = []
        for sample in reversed(self.samples):
            if len(found) == count or (found and _counts(sample) != _counts(found[0])):
                break
            found.append(sample)
        return found[::-1]


def _counts(sample: JobSample) -> tuple[int, int]:
    return len(sample.of(NodeType.PS)), len(sample.of(NodeType.WORKER))


class NodeUsage(Message, frozen=True):
    """What the nodes of one type used over a job: cores of one node (mean, and that of the busiest) and of all
    (median), the highest memory of one node and of all (MiB), and what each was given at the end.
    """

    count: int
    cpu: float
    busiest_cpu: float
    total_cpu: float
    memory: int
    total_memory: int
    resource: NodeResource


class PastJob(Message, frozen=True):
    """A finished job. `usage` by type of node; `speed`: the median of its last samples, in steps per second."""

    registration: RegisterJob
    usage: dict[str, NodeUsage]
    speed: float
    seconds: float


class ActiveJob(Message, frozen=True):
    """A job of the cluster: what it has, and what it would make of more or less. `kind`: of its units."""

    job: str
    kind: str
    units: int
    curve: tuple[SpeedPoint, ...]
    tenant: str = ""
    weight: float = 1.0
    age_s: float = 0.0
    plans: int = 0


class ClusterView(msgspec.Struct, frozen=True):
    """`capacity`: units of each kind ("cpu": cores, otherwise GPUs of a type); empty: not known. `quotas`: the most
    units of each tenant.
    """

    capacity: dict[str, int] = {}
    jobs: tuple[ActiveJob, ...] = ()
    quotas: dict[str, int] = {}


class Proposal(Message, frozen=True):
    """The answer of an algorithm. An empty plan: the job stays as it is, for this reason.

    `predicted`: steps per second with the plan; None: no model was used. `curve`: of the job, kept for plans of others.
    """

    plan: ResourcePlan
    reason: str
    predicted: float | None = None
    curve: tuple[SpeedPoint, ...] = ()


GROUP = "dlrover_hooks.brain_algorithms"
"""Of the entry points of plug-ins."""
Algorithm = Callable[[JobRecord, Sequence[PastJob], ClusterView, Mapping[str, Any]], "Proposal | None"]
"""Pure: the same arguments give the same answer. None: it has nothing to say, and the default is asked."""


class AlgorithmInput(msgspec.Struct, frozen=True):
    """The arguments of an algorithm as one message."""

    job: JobRecord
    history: tuple[PastJob, ...] = ()
    cluster: ClusterView = ClusterView()
    config: dict[str, Any] = {}
