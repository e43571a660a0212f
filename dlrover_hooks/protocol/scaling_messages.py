"""A job whose nodes the master plans: what it may have, the nodes that it is to have, and the plans that were made."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dlrover_hooks.protocol.base_messages import Count, ExitCode, Message, NodeResource, Seconds
from dlrover_hooks.protocol.resource_plans import Node, ResourceLimits, ResourcePlan

MOST_CHANGES = 4096
"""Nodes in one report."""
Label = Annotated[str, msgspec.Meta(max_length=256)]
Shortest = Annotated[float, msgspec.Meta(ge=0.1, le=1e9)]


class ScalingMode(enum.Enum):
    """Where the plans of a job come from: its user alone, its own master, or the Brain of the cluster."""

    MANUAL = "manual"
    SINGLE_JOB = "single-job"
    CLUSTER = "cluster"


class ScalingPace(Message, frozen=True):
    """How fast plans follow each other. The defaults suit steps of a second and nodes that start within minutes."""

    window_s: Shortest = 30.0
    """A sample is taken, and a plan may be made, so often. As often as DLRover's optimizer for parameter servers."""
    settle_s: Seconds = 60.0
    """After the nodes of a plan all run, so long no window counts: caches are cold and programs are compiled."""
    start_s: Seconds = 900.0
    """Within this time the nodes of a plan must run. As long as DLRover waits for a pending Pod."""
    cool_down_s: Seconds = 300.0
    """After a decision, so long no plan is made."""
    barred_s: Seconds = 3600.0
    """Nodes that a plan was rolled back for are planned again only after this time, doubled with each rollback."""


class StartScaling(Message, frozen=True):
    """Have the master plan the nodes of `job`. Creates the job if it is unknown. The sender starts and removes nodes.

    Sent again, as by a launcher that was restarted, it replaces mode, limits, pace and sizes. The nodes that the
    earlier launcher had started have ended with it: other ones are started, unless `keep_nodes`.

    `ps`: the job has parameter servers. Its nodes are the tasks that `AwaitTasks` lists. Refused (BadRequest) for a job
    of the other kind.
    """

    job: str
    incarnation: str
    mode: ScalingMode
    limits: ResourceLimits
    pace: ScalingPace = ScalingPace()
    ps: bool = False
    relaunches: Count = 10
    """Nodes that ended by a failure are replaced so often within `relaunch_window_s`; then the job is given up."""
    relaunch_window_s: Seconds = 3600.0
    user: Label = ""
    script_hash: Label = ""
    """Both find the finished jobs that are like this one, in Cluster Mode."""
    keep_nodes: bool = False
    """The nodes run elsewhere, and a job that is over stays so: it goes on with the nodes that it has."""
    sizes: dict[str, NodeResource] = msgspec.field(default_factory=dict[str, NodeResource])
    """By type of node (a value of `NodeType`): what its user has given it. Plans keep it; only nodes that were killed
    for memory get more."""


class ScaleNodes(Message, frozen=True):
    """A user's plan. It wins: the master makes no plan of its own until `release`.

    The nodes of `plan.node_resources` are parameter servers by their task's name, such as `ps:0`.
    """

    job: str
    incarnation: str
    plan: ResourcePlan = ResourcePlan()
    release: bool = False


class AwaitNodes(Message, frozen=True):
    """Long-poll until the nodes that the job is to have differ from list `after`, or `timeout_s` passes. Refused for a
    job with parameter servers: `AwaitTasks` lists its tasks.
    """

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class DesiredNodes(Message, frozen=True):
    """The nodes that the job is to have; every other one is to be removed. `number` increases with each change."""

    number: Count = 0
    nodes: tuple[Node, ...] = ()
    finished: bool = False
    """No node is needed any more: the job has succeeded, or was given up because of `failure`."""
    failure: str = ""
    exit_code: ExitCode = 0
    """Of the node that decided the end of the job."""


class NodeExit(enum.Enum):
    """Why a node has ended."""

    SUCCEEDED = "succeeded"
    ERROR = "error"
    USER_ERROR = "user error"
    """The user's program or a setting is wrong: another node would fail in the same way."""
    KILLED = "killed"
    OUT_OF_MEMORY = "out of memory"
    PREEMPTED = "preempted"
    """Its machine was taken away, or it was told to go. It is replaced, and counts as no failure."""
    NEVER_STARTED = "never started"
    REMOVED = "removed"
    """As the master had planned."""


class NodeChange(Message, frozen=True):
    """A node runs (`exit` is None), or has ended."""

    name: str
    exit: NodeExit | None = None
    exit_code: ExitCode = 0
    detail: str = ""


class ReportNodes(Message, frozen=True):
    """From what starts and removes nodes. A name that the master does not know is ignored: it was removed before."""

    job: str
    incarnation: str
    changes: Annotated[tuple[NodeChange, ...], msgspec.Meta(max_length=MOST_CHANGES)]


class ShowPlans(Message, frozen=True):
    """The plans of a job, the oldest first."""

    job: str


class PlanView(Message, frozen=True):
    """One plan. Speeds are in steps per second; None: not known."""

    number: Count
    age_s: Seconds
    what: str
    """The change, such as `worker 1 -> 2`."""
    reason: str
    outcome: str
    predicted: float | None = None
    before: float | None = None
    measured: float | None = None
    decided: str = ""
    """Why it was kept, rolled back or superseded."""


class Plans(Message, frozen=True):
    """The answer to `ShowPlans`."""

    job: str
    mode: ScalingMode
    ps: bool
    """The job has parameter servers; its nodes are tasks."""
    held: bool
    """A user's plan holds: the master makes no plan until it is released."""
    nodes: tuple[Node, ...]
    plans: tuple[PlanView, ...] = ()
    waits: str = ""
    """Why no plan is made now; empty: one may be made at the next window."""
    speed: float | None = None
    problem: str = ""
