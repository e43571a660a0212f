"""A job of several roles: which workers each role is to have, and what became of them.

A worker is named by its role, its rank in the role, and its life: the number of the process that holds this rank. The
master counts the lives. It starts a new one before the old process is killed, so whatever the old process still sends
is refused, and the end of one process is counted once.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dlrover_hooks.protocol.base_messages import Count, Message, Passed, Rank, Seconds

UNLIMITED = -1
"""A budget that is never used up."""
Budget = Annotated[int, msgspec.Meta(ge=UNLIMITED, le=1 << 31)]
"""How often something may happen within the window of the job; or `UNLIMITED`."""


class FailurePolicy(enum.Enum):
    """What follows when a worker of a role ends before it is done.

    REPLACE: a new process takes its rank; the other workers are not informed. REJOIN: the same, and the other workers
    form a new round with it in their processes, if all of them can; else as ROLE. ROLE: all workers of the role are
    started again. JOB: all workers of the job are. FAIL: the job ends.
    """

    REPLACE = "replace"
    REJOIN = "rejoin"
    ROLE = "role"
    JOB = "job"
    FAIL = "fail"


class WorkerCause(enum.Enum):
    """Why a worker ended before it was done.

    RAISED: its function raised an exception. KILLED: its process ended. SILENT: it sent no heartbeats. NODE_LOST: its
    node is gone. PREEMPTED: its place was needed. NEVER_STARTED: it could not be started in time. WRONG_SETTING: a user
    has to correct something, so the job ends whatever the policy is.
    """

    RAISED = "raised"
    KILLED = "killed"
    SILENT = "silent"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"
    NEVER_STARTED = "never_started"
    WRONG_SETTING = "wrong_setting"


class WorkerState(enum.Enum):
    """INITIAL: to be started. RUNNING: its process has registered. DONE: its function returned."""

    INITIAL = "initial"
    RUNNING = "running"
    DONE = "done"


class JobPhase(enum.Enum):
    """RUNNING; DONE: all workers of the driver roles are done; FAILED: it was given up; STOPPED: by a user."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class RoleRules(Message, frozen=True):
    """What the master needs to know of a role.

    `driver`: the job is done once all workers of all driver roles are. `worker_restarts`: how many of its workers may
    end before they are done within the window of the job. `role_restarts`: how often all its workers may be started
    again within it. Both may be `UNLIMITED`.
    """

    name: str
    workers: Rank
    on_failure: FailurePolicy = FailurePolicy.REPLACE
    driver: bool = True
    worker_restarts: Budget = 10
    role_restarts: Budget = 3


class RoleBudgets(Message, frozen=True):
    """Of the whole job; each may be `UNLIMITED`. Failures older than `window_s` do not count.

    `job_restarts`: how often all workers may be started again. `preemptions`: how many workers may be preempted; they
    count in no other budget. `node_failures`: a node where more workers failed is reported to the plug-ins, and where
    the platform allows it no worker is started there any more. `ready_s`: a worker must register within so many seconds
    from when it is to be started.
    """

    job_restarts: Budget = 3
    preemptions: Budget = UNLIMITED
    node_failures: Budget = 3
    window_s: Seconds = 3600.0
    ready_s: Seconds = 300.0


class RolePlugin(Message, frozen=True):
    """A plug-in that the job uses. `functions`: those that it has, by name. `failures`: how often one of them failed;
    `problem`: how the last time.
    """

    name: str
    functions: tuple[str, ...] = ()
    failures: Count = 0
    problem: str = ""


class StartRoles(Message, frozen=True):
    """Start a job of several roles. Sent again with the same `submission` it changes nothing; with one that another one
    has followed, it is refused (Stale).

    `takes_over`: it is the only one that uses this master, so a job that runs by the journal has lost its masters.
    `spec`: the job as its backend needs it, as JSON; the master only keeps it. A job that is over is started again by
    another submission; one that runs refuses it (Conflict).
    """

    job: str
    incarnation: str
    submission: str
    roles: tuple[RoleRules, ...]
    budgets: RoleBudgets = RoleBudgets()
    spec: str = ""
    takes_over: bool = False
    plugins: tuple[RolePlugin, ...] = ()


class RegisterWorker(Message, frozen=True):
    """The process of a worker is up. From now on it sends `Heartbeat`, and holds its `Watch` open.

    Refused (Stale) if `life` is not the current one of this rank: then the process ends.
    """

    job: str
    incarnation: str
    role: str
    rank: Rank
    life: Count
    node: str
    pid: Count = 0
    address: str = ""
    """Where calls of other roles reach it."""


class WorkerEnded(Message, frozen=True):
    """The process of life `life` has ended or will do nothing more. `cause` None: it is done.

    Sent by the SubMaster. Ignored for any life but the current one, and for one that was done. `recovers`: the other
    workers of the role recover in their processes. `policy`: what a plug-in wants to follow; None: as the role says.
    """

    job: str
    incarnation: str
    role: str
    rank: Rank
    life: Count
    cause: WorkerCause | None = None
    detail: str = ""
    recovers: bool = False
    policy: FailurePolicy | None = None


class WorkerWaits(Message, frozen=True):
    """The platform could not start a worker yet: `reason` says what is missing."""

    job: str
    incarnation: str
    role: str
    rank: Rank
    life: Count
    reason: str


class MasterRestarted(Message, frozen=True):
    """A SubMaster (of `role`) or the PrimeMaster (`role` empty) was started again. It is only noted in the events."""

    job: str
    incarnation: str
    role: str = ""


class PluginFailed(Message, frozen=True):
    """A function of a plug-in raised an exception, did not return in time, or returned what it must not. It is noted in
    the events and counted; nothing else follows.
    """

    job: str
    incarnation: str
    plugin: str
    function: str
    detail: str = ""


class NodesRelaunched(Message, frozen=True):
    """A plug-in has replaced these nodes, or restarted them: their failures do not count any more."""

    job: str
    incarnation: str
    nodes: tuple[str, ...]


class RestartRole(Message, frozen=True):
    """A user has all workers of a role started again. It counts in no budget."""

    job: str
    incarnation: str
    role: str
    reason: str = "a user asked for it"


class StopRoles(Message, frozen=True):
    """End the job before it is done. `failed`: it counts as failed, not as stopped."""

    job: str
    incarnation: str
    reason: str
    failed: bool = False


class RoleWorker(Message, frozen=True):
    """One worker. `reason`: why the life before it ended. `waits`: what its start waits for. `former`: the incarnation
    of the process before this one.
    """

    role: str
    rank: Rank
    life: Count
    state: WorkerState
    incarnation: str = ""
    node: str = ""
    pid: Count = 0
    address: str = ""
    reason: str = ""
    waits: str = ""
    former: str = ""


class RoleEvent(Message, frozen=True):
    """Something that happened, in order. `at`: seconds since the start of the job. `rank`, `life` -1: none.

    `detail` depends on the platform, all else but `at` does not.
    """

    at: Seconds
    kind: str
    role: str = ""
    rank: Passed = -1
    life: Passed = -1
    text: str = ""
    detail: str = ""


class RestartCount(Message, frozen=True):
    """How much of a budget is used, within the window. `of`: a role, a node, or empty for the job."""

    kind: str
    of: str
    used: Count
    limit: Budget


class ShowRoles(Message, frozen=True):
    """`role`: only the workers of this one."""

    job: str
    role: str = ""


class AwaitRoles(Message, frozen=True):
    """Long-poll until the workers have changed since `after`, or `timeout_s` passes: then the answer has no phase."""

    job: str
    incarnation: str
    after: Count = 0
    role: str = ""
    timeout_s: Seconds = 20.0


class Roles(Message, frozen=True):
    """A job of several roles, as it stands. `number` increases with every change."""

    number: Count = 0
    phase: JobPhase | None = None
    """None: nothing has changed since `AwaitRoles.after`."""
    reason: str = ""
    submission: str = ""
    spec: str = ""
    workers: tuple[RoleWorker, ...] = ()
    budgets: tuple[RestartCount, ...] = ()
    avoid: tuple[str, ...] = ()
    """Nodes with too many failures."""
    events: tuple[RoleEvent, ...] = ()
    """The newest ones; none in answers about one role."""
    dropped: Count = 0
    """How many older ones are not listed any more."""
    plugins: tuple[RolePlugin, ...] = ()
