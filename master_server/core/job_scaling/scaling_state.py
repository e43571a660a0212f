"""The journaled state of a job whose nodes are planned."""

from __future__ import annotations

import math

import msgspec

from dlrover_hooks.master.core.job_scaling.job_statistics import JobStatistics
from dlrover_hooks.master.core.job_scaling.plan_verification import PlanHistory, PlanOutcome
from dlrover_hooks.protocol import (
    DesiredNodes,
    Node,
    NodeResource,
    NodeStatus,
    NodeType,
    OptimizeStage,
    ResourceLimits,
    ScalingMode,
)

PRESENT = (NodeStatus.INITIAL, NodeStatus.RUNNING)
"""A node that the job is to have."""


class NodeRecord(msgspec.Struct):
    """What the master keeps of a node until it has ended. `since`: when its status began, by the clock of `now`.

    `relaunchable`: another node is started if it ends by a failure. `is_released`: it is to be removed.
    """

    type: NodeType
    id: int
    resource: NodeResource
    status: NodeStatus = NodeStatus.INITIAL
    since: float = 0.0
    relaunchable: bool = True
    is_released: bool = False

    @property
    def shown(self) -> Node:
        """The node as messages have it."""
        return Node(self.type, self.id, self.resource, status=self.status)


class JobScaling(msgspec.Struct):
    """All of it. Times are seconds by the clock of `now`. The tasks of parameter server jobs are in `ps_clusters`."""

    mode: ScalingMode
    limits: ResourceLimits
    relaunches: int = 10
    relaunch_window_s: float = 3600.0
    user: str = ""
    script_hash: str = ""
    sizes: dict[str, NodeResource] = {}
    """By type of node: those that the user has given."""
    stage: OptimizeStage = OptimizeStage.CREATE
    held: bool = False
    """A user's plan holds: no plan is made."""
    workers: int = 0
    worker_resource: NodeResource = NodeResource()
    """How many workers the job is to have, and the size of each."""
    nodes: list[NodeRecord] = []
    """In the order of their ids. A node that has ended is not listed any more."""
    last_id: int = -1
    number: int = 0
    """Of the list of nodes: increases with every change that is shown."""
    told: int = 0
    """The number that was announced last to what starts and removes nodes."""
    succeeded: int = 0
    """Workers that are done since the launch."""
    statistics: JobStatistics = JobStatistics()
    history: PlanHistory = PlanHistory()
    out_of_memory: tuple[Node, ...] = ()
    """Nodes that were killed for memory since the last plan."""
    failed_at: tuple[float, ...] = ()
    """When nodes ended by a failure, within the relaunch window."""
    finished: bool = False
    failure: str = ""
    exit_code: int = 0
    problem: str = ""
    """The last thing that went wrong, for a person."""

    @property
    def present(self) -> list[NodeRecord]:
        """The nodes that the job is to have."""
        return [node for node in self.nodes if node.status in PRESENT]

    @property
    def due(self) -> float:
        """When the next node, or a plan, is given up because it has not started; infinity: never."""
        if self.finished:
            return math.inf
        starting = [node.since for node in self.nodes if node.status is NodeStatus.INITIAL]
        if (plan := self.history.open) is not None and plan.outcome is PlanOutcome.STARTING:
            starting.append(plan.since)
        return min(starting, default=math.inf) + self.history.pace.start_s


def desired(scaling: JobScaling) -> DesiredNodes:
    """The nodes that the job is to have, as messages have them."""
    nodes = () if scaling.finished else tuple(node.shown for node in scaling.present)
    return DesiredNodes(scaling.number, nodes, scaling.finished, scaling.failure, scaling.exit_code)
