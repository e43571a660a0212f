"""What is measured for plans: of a job over one window, and of a cluster at one moment."""

from __future__ import annotations

import math

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.base_messages import Mebibytes, Message, NodeResource
from dlrover_hooks.protocol.ps_messages import NodeType

_MOST_MEMORY = 1 << 40


class NodeSample(msgspec.Struct, frozen=True):
    """One node: what it has, and of that how many CPU cores it used (mean), and MiB (highest since it was started).

    Raises `UsageError` if an amount is negative, not a finite number, or more MiB than any machine has.
    """

    name: str
    type: NodeType
    config_resource: NodeResource
    cpu: float
    memory: Mebibytes

    def __post_init__(self) -> None:
        if not math.isfinite(self.cpu) or self.cpu < 0 or not 0 <= self.memory <= _MOST_MEMORY:
            raise UsageError(
                f"sample of node {self.name}: it uses {self.cpu} cores and {self.memory} MiB",
                hint="give finite amounts of at least 0",
            )

    @property
    def cpu_share(self) -> float:
        """Used cores by configured ones; 0 where the configured ones are not known."""
        return self.cpu / self.config_resource.cpu if self.config_resource.cpu else 0.0


class JobSample(msgspec.Struct, frozen=True):
    """The speed of a job in steps per second, summed over workers that step apart, and its nodes in that window."""

    speed: float
    nodes: tuple[NodeSample, ...]

    def __post_init__(self) -> None:
        if not math.isfinite(self.speed) or self.speed < 0:
            raise UsageError(
                f"sample of a job: its speed is {self.speed}", hint="give finite steps per second, at least 0"
            )

    def of(self, kind: NodeType) -> list[NodeSample]:
        """The nodes of a type, in order of the sample."""
        return [node for node in self.nodes if node.type is kind]

    def largest(self, kind: NodeType) -> NodeResource:
        """The largest size of the nodes of a type, by cores and then memory; without such nodes, a size of nothing."""
        sizes = (node.config_resource for node in self.of(kind))
        return max(sizes, key=lambda one: (one.cpu, one.memory), default=NodeResource())


class ClusterJob(Message, frozen=True):
    """What the processes of a job use, or have reserved: cores, MiB."""

    job: str
    processes: int
    cpu: float
    memory: int


class ClusterSample(Message, frozen=True):
    """`source`: a machine, whose units are added to those of other machines; or "" for a whole cluster.

    `capacity`: units of each kind ("cpu": cores, otherwise GPUs of a type). `memory` and `used_memory` in MiB.
    """

    platform: str
    source: str
    capacity: dict[str, int]
    used_cpu: float
    memory: int
    used_memory: int
    jobs: tuple[ClusterJob, ...] = ()


class ClusterAnswer(Message, frozen=True):
    """Of a process that is connected to a cluster, as a line of JSON. `problem`: why there is no sample."""

    sample: ClusterSample | None = None
    problem: str = ""
