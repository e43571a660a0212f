"""Messages about jobs of several roles: which workers each role must have, and how they ended.

A worker is identified by its role, its rank in the role, and its life: the number of the process that holds this rank.
The master increases the number before the old process is killed. It refuses requests with an old number, and counts
the end of each life once.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dlrover_hooks.protocol.base_messages import Count, Message, Passed, Rank, Seconds

UNLIMITED = -1
"""A budget without a limit."""
MOST_BUDGET = 1 << 31
"""The largest budget with a limit."""
MOST_ROLE_WORKERS = 16_384
"""The largest number of workers of all roles of a job."""
Budget = Annotated[int, msgspec.Meta(ge=UNLIMITED, le=MOST_BUDGET)]
"""How often something may happen within `RoleBudgets.window_s`; or `UNLIMITED`."""


class FailurePolicy(enum.Enum):
    """What the master does when a worker of a role ends before it is done.

    REPLACE: a new process takes its rank; the other workers are not informed. REJOIN: a new process takes its rank,
    and the other workers keep their processes and form a new round with it, if all of them can; otherwise as ROLE.
    ROLE: all workers of the role are started again. JOB: all workers of the job are started again. FAIL: the job fails.
    """

    REPLACE = "replace"
    REJOIN = "rejoin"
    ROLE = "role"
    JOB = "job"
    FAIL = "fail"


class WorkerCause(enum.Enum):
    """Why a worker ended before it was done.

    RAISED: its function raised an exception or exited with another code than 0 and 75. KILLED: its process ended.
    SILENT: it missed its heartbeats. NODE_LOST: its node was lost. PREEMPTED: it exited with code 75. NEVER_STARTED: it
    did not register within `RoleBudgets.ready_s`. WRONG_SETTING: the user must correct something, so the job fails
    whatever the policy is.
    """

    RAISED = "raised"
    KILLED = "killed"
    SILENT = "silent"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"
    NEVER_STARTED = "never_started"
    WRONG_SETTING = "wrong_setting"


class WorkerState(enum.Enum):
    """INITIAL: its process has not registered yet. RUNNING: its process has registered. DONE: its function returned."""

    INITIAL = "initial"
    RUNNING = "running"
    DONE = "done"


class JobPhase(enum.Enum):
    """RUNNING: not over. DONE: all workers of the driver roles are done. FAILED: ended by a failure. STOPPED: ended by
    a user."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class RoleRules(Message, frozen=True):
    """One role of a job, for the master.

    `driver`: the job is done once all workers of all driver roles are done. `worker_restarts`: how many workers of the
    role may end before they are done. `role_restarts`: how often all its workers may be started again by the policy
    ROLE. Both count within `RoleBudgets.window_s`, and both may be `UNLIMITED`.
    """

    name: str
    workers: Rank
    on_failure: FailurePolicy = FailurePolicy.REPLACE
    driver: bool = True
    worker_restarts: Budget = 10
    role_restarts: Budget = 3


class RoleBudgets(Message, frozen=True):
    """Budgets of an entire job; each may be `UNLIMITED`. Failures older than `window_s` seconds do not count.

    `job_restarts`: how often all workers may be started again by the policy JOB. `preemptions`: how many workers may be
    preempted; they do not count in `worker_restarts` or `node_failures`. `node_failures`: if more workers fail on a
    node, the node is reported to plug-ins, and workers are started on other nodes if possible. `ready_s`: how many
    seconds a worker may take to register, counted from the beginning of its life.
    """

    job_restarts: Budget = 3
    preemptions: Budget = UNLIMITED
    node_failures: Budget = 3
    window_s: Seconds = 3600.0
    ready_s: Seconds = 300.0


class RolePlugin(Message, frozen=True):
    """A plug-in of the job. `functions`: the names of its functions. `failures`: how often one of them failed.
    `problem`: the last failure.
    """

    name: str
    functions: tuple[str, ...] = ()
    failures: Count = 0
    problem: str = ""


class StartRoles(Message, frozen=True):
    """Start a job of several roles.

    With the current `submission` it changes nothing; with an earlier one it is refused (Stale). A new submission is
    refused (Conflict) while the job runs, unless `takes_over` is set: then the sender is the only user of this master,
    so a job that still runs according to the journal has lost its masters and is replaced. `spec`: the job as JSON,
    stored for its backend and not read by the master.
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
    """Register the process of a worker. It then sends `Heartbeat`, and keeps a connection for `Watch` open.

    Refused (Stale) if `life` is not the current one of this rank; the process then ends.
    """

    job: str
    incarnation: str
    role: str
    rank: Rank
    life: Count
    node: str
    pid: Count = 0
    address: str = ""
    """Where it serves calls of other workers."""


class WorkerEnded(Message, frozen=True):
    """The process or the function of a worker has ended. `cause` None: the worker is done.

    Sent by its SubMaster. Ignored if `life` is not the current one, or is done. `recovers`: all other workers of the
    role can recover in their processes. `policy`: the choice of a plug-in; None: that of the role.
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
    """The platform could not start a worker yet. `reason`: what is missing."""

    job: str
    incarnation: str
    role: str
    rank: Rank
    life: Count
    reason: str


class MasterRestarted(Message, frozen=True):
    """The SubMaster of `role`, or the PrimeMaster (`role` empty), was started again. Only recorded as an event."""

    job: str
    incarnation: str
    role: str = ""


class PluginFailed(Message, frozen=True):
    """A function of a plug-in raised an exception, exceeded its timeout, or returned an invalid value. Only recorded as
    an event, and counted.
    """

    job: str
    incarnation: str
    plugin: str
    function: str
    detail: str = ""


class NodesRelaunched(Message, frozen=True):
    """A plug-in has replaced or restarted these nodes: their former failures no longer count."""

    job: str
    incarnation: str
    nodes: tuple[str, ...]


class RestartRole(Message, frozen=True):
    """Start all workers of a role again, for a user. It counts in no budget."""

    job: str
    incarnation: str
    role: str
    reason: str = "a user asked for it"


class StopRoles(Message, frozen=True):
    """End the job before it is done. `failed`: its phase becomes FAILED, not STOPPED."""

    job: str
    incarnation: str
    reason: str
    failed: bool = False


class RoleWorker(Message, frozen=True):
    """One worker. `reason`: why its previous life ended. `waits`: what its start waits for. `former`: the incarnation
    of the previous process of this rank.
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
    """An event of the job. `at`: seconds since the start of the job. `rank`, `life`: -1 if it is about no worker.

    `at` and `detail` depend on the platform; the other fields do not.
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
    """Get the state of a job of several roles. `role`: only the workers of this role; empty: everything."""

    job: str
    role: str = ""


class AwaitRoles(Message, frozen=True):
    """Wait until the state differs from that with number `after` (`Roles.number`). After `timeout_s` seconds without a
    change the answer has no phase. `role`: as in `ShowRoles`."""

    job: str
    incarnation: str
    after: Count = 0
    role: str = ""
    timeout_s: Seconds = 20.0


class Roles(Message, frozen=True):
    """The state of a job of several roles. `number` increases with every change."""

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
    """The newest events; none in answers about one role."""
    dropped: Count = 0
    """How many older events are no longer listed."""
    plugins: tuple[RolePlugin, ...] = ()
