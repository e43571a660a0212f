"""Tasks of a parameter server job (chief, parameter servers, workers), and the versions of its cluster.

The words are TensorFlow's: a task has a type and an index. The chief is the only process that runs user code: it alone
connects to a cluster version and acknowledges it.
"""

from __future__ import annotations

import enum

from dlrover_hooks.protocol.base_messages import Count, ExitCode, Message, NodeResource, Rank, Seconds


class NodeType(enum.Enum):
    """What a node or a task does. Plans may name all of these; the tasks of a job are chief, servers and workers."""

    CHIEF = "chief"
    PS = "ps"
    WORKER = "worker"
    EVALUATOR = "evaluator"
    MASTER = "master"


class NodeStatus(enum.Enum):
    """Where a node or a task is in its life.

    INITIAL: to be started. RUNNING: registered and alive. PRE_DROPPED: alive, but not in the announced cluster version;
    it is stopped once the chief has left it. FAILED: dead or unreachable, and not fenced: its process may still exist
    and must be killed. RELEASED: to be stopped. A task whose process is known to be gone is no longer listed.
    """

    INITIAL = "initial"
    RUNNING = "running"
    PRE_DROPPED = "pre_dropped"
    FAILED = "failed"
    RELEASED = "released"


class Task(Message, frozen=True):
    """One process. `id` counts up within the job: a replacement has the type and index of the old task and a new id."""

    id: Count
    type: NodeType
    index: Rank
    status: NodeStatus
    incarnation: str = ""
    """Of the process; empty before it registers."""
    address: str = ""
    """`host:port` of its server; empty for the chief, and before it registers."""
    reason: str = ""
    """Why it failed or was released."""
    resource: NodeResource = NodeResource()
    """Limits of CPU and memory that its launcher sets."""


class ScaleTasks(Message, frozen=True):
    """Set how many parameter servers and workers the job shall have. None: as it is. Creates the job if it is unknown.

    Indices are 0 to n - 1: the highest ones are removed first. While a switch is under way the request is kept and
    carried out after it. A new task that is not RUNNING within `ready_within_s` is released, and the target is set
    back to what the current cluster has; the job goes on with it.

    `ps_resource` and `worker_resource` are of tasks that are added from now on; those that run keep theirs, and so do
    their replacements. None: as it is.
    """

    job: str
    incarnation: str
    """The sender; it need not be a task."""
    ps: Rank | None = None
    workers: Rank | None = None
    ready_within_s: Seconds = 120.0
    only_first: bool = False
    """Only if no target was ever set: a launcher that starts again must not undo what a person has changed."""
    ps_resource: NodeResource | None = None
    worker_resource: NodeResource | None = None


class MigrateTask(Message, frozen=True):
    """Replace a healthy parameter server or worker: the new one runs first, then the chief switches, then the old one
    is released. Only for tasks that a launcher started.
    """

    job: str
    incarnation: str
    type: NodeType
    index: Rank
    ready_within_s: Seconds = 120.0
    resource: NodeResource | None = None
    """Of the new one, and of its replacements; None: as the old one."""


class RegisterTask(Message, frozen=True):
    """A process of the job is up. `task`: the id that the launcher gave it; None for one that was started without us
    (`TF_CONFIG`): it takes the place of its type and index, and an older process there is thereby fenced.

    Refused (Conflict) if a live chief is registered and this is another one. Parameter servers and workers send
    `Heartbeat` from then on; a process without a launcher waits for its release with `AwaitTasks`, ends its server and
    sends `Leave` last. A refused heartbeat (Stale) means: end.
    """

    job: str
    incarnation: str
    type: NodeType
    index: Rank
    address: str = ""
    task: Count | None = None


class ReportTask(Message, frozen=True):
    """The chief cannot reach a task of cluster `version`. It becomes FAILED, so it is killed and replaced.

    `index`: position in the list of that version. Ignored if the version is no longer current or announced, or if the
    task that had this position is gone already.
    """

    job: str
    incarnation: str
    version: Count
    type: NodeType
    index: Rank
    reason: str


class Fenced(Message, frozen=True):
    """The process of task `task` is gone for certain: a launcher has reaped it. `exit_code` as in `Exited`.

    A chief that ended with 0 is done: then all other tasks are RELEASED. Send it for a task that was released before it
    was started, too.
    """

    job: str
    incarnation: str
    """The launcher."""
    task: Count
    exit_code: ExitCode = 0
    out_of_memory: bool = False
    """The kernel has killed it for want of memory."""


class AwaitTasks(Message, frozen=True):
    """Long-poll until the list of tasks has changed since `after`, or `timeout_s` passes: then `Tasks` is empty and has
    the number `after`.
    """

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class ShowTasks(Message, frozen=True):
    job: str


class Tasks(Message, frozen=True):
    """All tasks of the job. Launchers start those that are INITIAL, and kill and reap those FAILED or RELEASED."""

    number: Count = 0
    """Increases with every change."""
    tasks: tuple[Task, ...] = ()
    version: Count = 0
    """The last cluster version that was announced."""
    acknowledged: Count = 0
    """The version that the chief is connected to; 0: none yet."""
    ps: Rank = 0
    workers: Rank = 0
    """How many the job shall have."""
    finished: bool = False
    problem: str = ""
    """Why the last change was rolled back."""


class AwaitCluster(Message, frozen=True):
    """Long-poll of the chief: until a cluster version after `after` is announced, or `timeout_s` passes."""

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class PSCluster(Message, frozen=True):
    """One PS cluster version: addresses by position. A parameter server's position is its index; of the workers only
    those that run are listed. `version` as in the request: no newer one, send it again.

    `crash`: a parameter server of the acknowledged version is gone, and with it the model's state since the last
    checkpoint. Otherwise the old servers stay until the acknowledgement: finish what is scheduled and save first.
    """

    version: Count = 0
    ps: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    crash: bool = False
    why: str = ""


class Connected(Message, frozen=True):
    """The chief acknowledges `version`: it is connected and its model restored. The servers that are left out are then
    released.

    `failed`: why it could not. The change is rolled back: the new tasks are released and the acknowledged list is
    announced again as a new version.
    """

    job: str
    incarnation: str
    version: Count
    failed: str = ""


class EndTasks(Message, frozen=True):
    """The chief's work is done: all other tasks are RELEASED. The chief ends by itself, with `Leave` or `Fenced`."""

    job: str
    incarnation: str
