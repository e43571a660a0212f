"""The one table of routes: every message between a worker, an agent and the master.

Client and server are both generated from `ROUTES`: a message is a frozen struct plus a row here, nothing else. Bodies
are JSON; decoding is typed (msgspec), unknown fields are ignored so that protocol N reads N+1's additions. Requests
that change state are *events*: the core applies them, the journal keeps them, and a repeated event gets the first
reply again (`Idempotency-Key: INCARNATION/CHANNEL/SEQ`).

Units: `_s` seconds, `_bytes` bytes. `now` is never in a request: the master's clock is the only one.
"""

from __future__ import annotations

from typing import ClassVar

from dlrover_hooks.protocol.base_messages import Done, Message
from dlrover_hooks.protocol.checkpoint_messages import (
    Attach,
    Attached,
    AwaitPlan,
    Loaded,
    Locate,
    Located,
    Plan,
    Vote,
    Voted,
)
from dlrover_hooks.protocol.key_value_messages import AwaitKeys, ChangeKeys, KeyNames, KeyValues, ListKeys
from dlrover_hooks.protocol.lease_messages import (
    AwaitShards,
    Leases,
    Ledger,
    LedgerView,
    OpenLedger,
    ShowLedger,
    TakeLeases,
)
from dlrover_hooks.protocol.membership_messages import (
    AwaitParting,
    AwaitRound,
    Beat,
    Exited,
    Heartbeat,
    Hold,
    Join,
    Joined,
    Leave,
    Notice,
    Parting,
    Preempt,
    Seated,
    Watch,
)
from dlrover_hooks.protocol.node_check_messages import (
    AwaitCheck,
    CheckJoined,
    CheckReport,
    CheckStep,
    JoinCheck,
    ReportTransfer,
    ShowCheck,
)
from dlrover_hooks.protocol.ps_messages import (
    AwaitCluster,
    AwaitTasks,
    Connected,
    EndTasks,
    Fenced,
    MigrateTask,
    PSCluster,
    RegisterTask,
    ReportTask,
    ScaleTasks,
    ShowTasks,
    Task,
    Tasks,
)
from dlrover_hooks.protocol.role_messages import (
    AwaitRoles,
    MasterRestarted,
    NodesRelaunched,
    PluginFailed,
    RegisterWorker,
    RestartRole,
    Roles,
    RoleWorker,
    ShowRoles,
    StartRoles,
    StopRoles,
    WorkerEnded,
    WorkerWaits,
)
from dlrover_hooks.protocol.scaling_messages import (
    AwaitNodes,
    DesiredNodes,
    Plans,
    ReportNodes,
    ScaleNodes,
    ShowPlans,
    StartScaling,
)
from dlrover_hooks.protocol.view_messages import DeleteJob, Jobs, JobView, JobVitals, ListJobs, ShowJob, ShowVitals
from dlrover_hooks.protocol.vitals_messages import NextVitals, NodeVitals


class Route(Message, frozen=True):
    """One row: how `request` travels. GET and DELETE have the fields in path and query; POST sends the struct as JSON.

    `event`: changes state, so it is journaled and carries an idempotency key. `waits`: a long-poll.
    """

    method: str
    path: str
    request: type[Message]
    reply: type[Message]
    event: bool = False
    waits: bool = False
    summary: str = ""

    @property
    def in_url(self) -> bool:
        """The whole request is in path and query: it has no body."""
        return self.method in ("GET", "DELETE")


ROUTES: tuple[Route, ...] = (
    Route(method="GET", path="/v1/jobs", request=ListJobs, reply=Jobs, summary="Names of the jobs this master keeps."),
    Route(method="GET", path="/v1/jobs/{job}", request=ShowJob, reply=JobView, summary="One job, as it stands."),
    Route(method="DELETE", path="/v1/jobs/{job}", request=DeleteJob, reply=Done, event=True, summary="Forget a job."),
    Route(method="POST", path="/v1/join", request=Join, reply=Joined, event=True, summary="Ask for ranks in a round."),
    Route(method="POST", path="/v1/round", request=AwaitRound, reply=Seated, waits=True, summary="Wait for ranks."),
    Route(method="POST", path="/v1/attach", request=Attach, reply=Attached, event=True, summary="Take a rank."),
    Route(
        method="POST", path="/v1/plan", request=AwaitPlan, reply=Plan, waits=True, summary="Wait for what to restore."
    ),
    Route(method="POST", path="/v1/locate", request=Locate, reply=Located, summary="Ask who holds an image."),
    Route(method="POST", path="/v1/loaded", request=Loaded, reply=Done, event=True, summary="Report the restore."),
    Route(method="POST", path="/v1/heartbeat", request=Heartbeat, reply=Beat, summary="Refresh the lease."),
    Route(method="POST", path="/v1/vitals", request=NodeVitals, reply=NextVitals, summary="Report a node's use."),
    Route(
        method="GET",
        path="/v1/jobs/{job}/vitals",
        request=ShowVitals,
        reply=JobVitals,
        summary="What nodes and ranks use.",
    ),
    Route(method="POST", path="/v1/watch", request=Watch, reply=Notice, waits=True, summary="The liveness connection."),
    Route(method="POST", path="/v1/exited", request=Exited, reply=Done, event=True, summary="A worker was reaped."),
    Route(method="POST", path="/v1/preempt", request=Preempt, reply=Parting, event=True, summary="A node is to go."),
    Route(method="POST", path="/v1/hold", request=Hold, reply=Parting, event=True, summary="Promise to wait."),
    Route(
        method="POST", path="/v1/parting", request=AwaitParting, reply=Parting, waits=True, summary="Where to leave."
    ),
    Route(method="POST", path="/v1/leave", request=Leave, reply=Done, event=True, summary="Leave politely."),
    Route(
        method="POST", path="/v1/ledger", request=OpenLedger, reply=Ledger, event=True, summary="Lend out a dataset."
    ),
    Route(
        method="POST", path="/v1/leases", request=TakeLeases, reply=Leases, event=True, summary="Take and acknowledge."
    ),
    Route(method="POST", path="/v1/shards", request=AwaitShards, reply=Leases, waits=True, summary="Wait for shards."),
    Route(
        method="GET",
        path="/v1/jobs/{job}/ledgers/{name}",
        request=ShowLedger,
        reply=LedgerView,
        summary="One ledger, as it stands.",
    ),
    Route(
        method="POST",
        path="/v1/keys",
        request=ChangeKeys,
        reply=KeyValues,
        event=True,
        summary="Change keys.",
    ),
    Route(
        method="POST", path="/v1/keys/await", request=AwaitKeys, reply=KeyValues, waits=True, summary="Wait for keys."
    ),
    Route(method="POST", path="/v1/keys/list", request=ListKeys, reply=KeyNames, summary="Names of a round's keys."),
    Route(method="POST", path="/v1/vote", request=Vote, reply=Voted, event=True, summary="Vote for a generation."),
    Route(method="POST", path="/v1/tasks/scale", request=ScaleTasks, reply=Tasks, event=True, summary="Set targets."),
    Route(
        method="POST", path="/v1/tasks/migrate", request=MigrateTask, reply=Tasks, event=True, summary="Move a task."
    ),
    Route(
        method="POST", path="/v1/tasks/register", request=RegisterTask, reply=Task, event=True, summary="A task is up."
    ),
    Route(
        method="POST", path="/v1/tasks/report", request=ReportTask, reply=Done, event=True, summary="A task is away."
    ),
    Route(method="POST", path="/v1/tasks/fenced", request=Fenced, reply=Done, event=True, summary="A task was reaped."),
    Route(method="POST", path="/v1/tasks/end", request=EndTasks, reply=Done, event=True, summary="The chief is done."),
    Route(
        method="POST", path="/v1/tasks/await", request=AwaitTasks, reply=Tasks, waits=True, summary="Wait for changes."
    ),
    Route(
        method="GET", path="/v1/jobs/{job}/tasks", request=ShowTasks, reply=Tasks, summary="All tasks, as they stand."
    ),
    Route(method="POST", path="/v1/roles/start", request=StartRoles, reply=Roles, event=True, summary="Start a job."),
    Route(
        method="POST",
        path="/v1/roles/register",
        request=RegisterWorker,
        reply=RoleWorker,
        event=True,
        summary="Register the process of a worker.",
    ),
    Route(
        method="POST", path="/v1/roles/ended", request=WorkerEnded, reply=Done, event=True, summary="End of a worker"
    ),
    Route(method="POST", path="/v1/roles/waits", request=WorkerWaits, reply=Done, event=True, summary="Worker waits."),
    Route(
        method="POST",
        path="/v1/roles/master",
        request=MasterRestarted,
        reply=Done,
        event=True,
        summary="A PrimeMaster or a SubMaster was started again.",
    ),
    Route(
        method="POST",
        path="/v1/roles/plugin-failed",
        request=PluginFailed,
        reply=Done,
        event=True,
        summary="A plug-in failed.",
    ),
    Route(
        method="POST",
        path="/v1/roles/relaunched",
        request=NodesRelaunched,
        reply=Done,
        event=True,
        summary="A plug-in has relaunched nodes.",
    ),
    Route(
        method="POST", path="/v1/roles/restart", request=RestartRole, reply=Roles, event=True, summary="Restart a role."
    ),
    Route(method="POST", path="/v1/roles/stop", request=StopRoles, reply=Roles, event=True, summary="End the job."),
    Route(
        method="POST", path="/v1/roles/await", request=AwaitRoles, reply=Roles, waits=True, summary="Wait for changes."
    ),
    Route(method="GET", path="/v1/jobs/{job}/roles", request=ShowRoles, reply=Roles, summary="Show a job of roles."),
    Route(
        method="POST",
        path="/v1/scaling/start",
        request=StartScaling,
        reply=DesiredNodes,
        event=True,
        summary="Have the nodes of a job planned.",
    ),
    Route(
        method="POST",
        path="/v1/scaling/scale",
        request=ScaleNodes,
        reply=DesiredNodes,
        event=True,
        summary="Set or release a user's plan.",
    ),
    Route(
        method="POST", path="/v1/scaling/nodes", request=ReportNodes, reply=Done, event=True, summary="Nodes changed."
    ),
    Route(
        method="POST",
        path="/v1/scaling/await",
        request=AwaitNodes,
        reply=DesiredNodes,
        waits=True,
        summary="Wait for other nodes to be planned.",
    ),
    Route(method="GET", path="/v1/jobs/{job}/plans", request=ShowPlans, reply=Plans, summary="Plans of a job's nodes."),
    Route(
        method="POST",
        path="/v1/cluster/await",
        request=AwaitCluster,
        reply=PSCluster,
        waits=True,
        summary="Wait for a cluster version.",
    ),
    Route(
        method="POST",
        path="/v1/cluster/connected",
        request=Connected,
        reply=Done,
        event=True,
        summary="Acknowledge a cluster version.",
    ),
    Route(
        method="POST", path="/v1/check/join", request=JoinCheck, reply=CheckJoined, event=True, summary="Be checked."
    ),
    Route(
        method="POST", path="/v1/check/await", request=AwaitCheck, reply=CheckStep, waits=True, summary="Wait for it."
    ),
    Route(
        method="POST",
        path="/v1/check/transfer",
        request=ReportTransfer,
        reply=Done,
        event=True,
        summary="Report a transfer between two nodes.",
    ),
    Route(
        method="GET",
        path="/v1/jobs/{job}/check",
        request=ShowCheck,
        reply=CheckReport,
        summary="The last check of a job's nodes.",
    ),
)


class Routes:
    """`ROUTES` by request type."""

    by_request: ClassVar[dict[type[Message], Route]] = {route.request: route for route in ROUTES}
