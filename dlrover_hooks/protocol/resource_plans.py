"""What a job should have (`ResourcePlan`) and which nodes are started and stopped for it (`ScalePlan`)."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.base_messages import Count, Mebibytes, NodeResource, Rank
from dlrover_hooks.protocol.ps_messages import NodeStatus, NodeType


class OptimizeStage(enum.Enum):
    """How far a job is. RUNNING plans parameter servers first, then workers."""

    CREATE = "job_stage_create"
    WORKER_INITIAL = "job_stage_worker_initial"
    PS_INITIAL = "job_stage_ps_initial"
    RUNNING = "job_stage_running"


class NodeGroupResource(msgspec.Struct, frozen=True):
    """All nodes of one type: how many, and what each of them has. Raises `UsageError` if `count` is negative."""

    count: Rank = 0
    node_resource: NodeResource = NodeResource()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(f"node group: count is {self.count}", hint="give a count of at least 0")


class ResourcePlan(msgspec.Struct, frozen=True):
    """What a job should have: by type of node (a value of `NodeType`), and for single nodes by their name.

    Empty: nothing changes. The two dictionaries are filled while the plan is made; call `check` before it is used.
    """

    node_group_resources: dict[str, NodeGroupResource] = {}
    node_resources: dict[str, NodeResource] = {}

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return not self.node_group_resources and not self.node_resources

    def check(self, nodes: Collection[str]) -> None:
        """Raise `UsageError` if a type of node is unknown, or a node is not one of `nodes`."""
        _check_types(self.node_group_resources)
        if unknown := sorted(set(self.node_resources) - set(nodes)):
            raise UsageError(f"resource plan: unknown node {unknown[0]}", hint="name a node that the job has")


class ResourceLimits(msgspec.Struct, frozen=True):
    """Of a whole job: CPU cores and MiB of memory, and how many nodes of each type it may have.

    The defaults of the counts are those of DLRover's optimizer. Raises `UsageError` if no plan can satisfy them.
    """

    cpu: float
    memory: Mebibytes
    min_workers: Rank = 1
    max_workers: Rank = 60
    max_ps: Rank = 15
    min_ps: Rank = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cpu) and self.cpu >= 1 and self.memory >= 1024):
            raise UsageError(
                f"limits of the job: {self.cpu} cores and {self.memory} MiB",
                hint="a node needs at least 1 core and 1024 MiB",
            )
        if not 1 <= self.min_workers <= self.max_workers:
            raise UsageError(
                f"limits of the job: min_workers {self.min_workers}, max_workers {self.max_workers}",
                hint="give 1 <= min_workers <= max_workers",
            )
        if not 1 <= self.min_ps <= self.max_ps:
            raise UsageError(
                f"limits of the job: min_ps {self.min_ps}, max_ps {self.max_ps}", hint="give 1 <= min_ps <= max_ps"
            )
        if self.min_workers > self.cpu or self.min_workers * 1024 > self.memory:
            raise UsageError(
                f"limits of the job: {self.cpu} cores, {self.memory} MiB are too little for {self.min_workers} workers",
                hint="a worker needs at least 1 core and 1024 MiB; raise the limits, or lower min_workers",
            )


class Node(msgspec.Struct, frozen=True):
    """One node of a job. Without a name it is called by its type and id, as in `worker-0`.

    `index`: its place among the nodes of its type, such as the one of a parameter server; by default the id. A
    replacement has the index of the node before it, and another id.
    """

    type: NodeType
    id: Count
    config_resource: NodeResource = NodeResource()
    name: str = ""
    status: NodeStatus = NodeStatus.INITIAL
    index: Rank | None = None

    def __post_init__(self) -> None:
        if self.id < 0:
            raise UsageError(f"node: id is {self.id}", hint="give an id of at least 0")
        if not self.name:
            msgspec.structs.force_setattr(self, "name", f"{self.type.value}-{self.id}")
        if self.index is None:
            msgspec.structs.force_setattr(self, "index", self.id)


class ScalePlan(msgspec.Struct):
    """Which nodes are started and stopped. Not frozen: one thread fills it, then it is handed on and left alone.

    `node_group_resource` is the group of the workers in `node_group_resources`.
    """

    node_group_resources: dict[str, NodeGroupResource] = {}
    launch_nodes: list[Node] = []
    remove_nodes: list[Node] = []
    ps_addrs: list[str] = []

    @property
    def node_group_resource(self) -> NodeGroupResource | None:
        """The group of the workers. None: it stays as it is."""
        return self.node_group_resources.get(NodeType.WORKER.value)

    @node_group_resource.setter
    def node_group_resource(self, group: NodeGroupResource) -> None:
        self.node_group_resources[NodeType.WORKER.value] = group

    def check(self, nodes: Collection[str]) -> None:
        """Raise `UsageError`: an unknown type, a node to remove that is not one of `nodes`, a node in both lists."""
        _check_types(self.node_group_resources)
        for node in self.remove_nodes:
            if node.name not in nodes:
                raise UsageError(f"scale plan: unknown node {node.name}", hint="remove a node that the job has")
        if both := {node.name for node in self.launch_nodes} & {node.name for node in self.remove_nodes}:
            raise UsageError(
                f"scale plan: {min(both)} is both launched and removed", hint="give the new node a new name"
            )


def _check_types(groups: Collection[str]) -> None:
    known = {kind.value for kind in NodeType}
    if unknown := sorted(set(groups) - known):
        raise UsageError(f"plan: unknown type of node {unknown[0]}", hint=f"the types are {', '.join(sorted(known))}")
