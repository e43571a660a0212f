"""Views of the master's jobs and of what they use, and the request to delete one."""

from __future__ import annotations

from dlrover_hooks.protocol.base_messages import Count, ExitCode, Message, NodeResource, Phase, Rank, Seconds, Step
from dlrover_hooks.protocol.checkpoint_messages import Generation, Source, Unstored
from dlrover_hooks.protocol.membership_messages import Ending, Parting, Shares, Stall
from dlrover_hooks.protocol.node_check_messages import KeptOut
from dlrover_hooks.protocol.ps_messages import NodeStatus, NodeType
from dlrover_hooks.protocol.vitals_messages import (
    CPUVitals,
    DiskVitals,
    MemoryVitals,
    NetworkVitals,
    StepPhases,
    Straggler,
    Vitals,
    WorkerProcesses,
)

LISTED_GONE = 64
"""Most members of other nodes in a view for one node. A view is then small, whatever the size of the job."""


class ListJobs(Message, frozen=True):
    pass


class Jobs(Message, frozen=True):
    jobs: tuple[str, ...]


class ShowJob(Message, frozen=True):
    """The state of a job. `node`: for a process of that node, see `JobView.members`; the others are not listed then.

    `window_s`: see `JobView.recent_failures`.
    """

    job: str
    node: str = ""
    window_s: Seconds = 1e9


class DeleteJob(Message, frozen=True):
    """Delete a job; its checkpoints stay. Refused (JobAlive) while it has workers or checks nodes, unless `force`."""

    job: str
    force: bool = False


class MemberView(Message, frozen=True):
    incarnation: str
    node: str
    rank: Rank
    local_rank: Rank
    attached: bool
    alive: bool
    step: Step = 0
    recovers: bool = False
    """See `Attach`."""
    gone: str = ""
    """How it left: a `Departure`, `lost`, `stalled` (it made no steps, and the master ended it), `slow` (the others
    waited for it, and the master ended it or its node), `replaced` (its agent joined again for it), or `exited` (its
    process ended with 0 without a `Leave`)."""
    exit_code: ExitCode | None = None
    """As its launcher reported it."""
    stall: Stall | None = None
    straggler: Straggler | None = None
    """While the others wait for it."""


class Unlisted(Message, frozen=True):
    """Counts of the members that a view leaves out. None of them has exited without a `Leave`."""

    alive: Count = 0
    attached: Count = 0
    """Alive, and attached."""
    recovers: Count = 0
    """Alive, attached, and `MemberView.recovers`."""
    unended: Count = 0
    """Those that neither left as done nor ended with exit code 0."""


class JobView(Message, frozen=True):
    job: str
    run: str
    attempt: Count
    round: Count
    phase: Phase
    step: Step
    members: tuple[MemberView, ...] = ()
    """By rank: all; or for `ShowJob.node` those of that node, and up to `LISTED_GONE` others that are gone, first
    the lost ones with no exit code or a signal, last those that are done."""
    unlisted: Unlisted = Unlisted()
    lost_nodes: tuple[str, ...] = ()
    """Nodes that have lost members and have none left; at most `LISTED_GONE`, sorted."""
    newest_complete: Generation | None = None
    newest_committed: Generation | None = None
    unstored: Unstored | None = None
    restored_from: Source | None = None
    finished: bool = False
    finished_step: Step | None = None
    begun_step: Step | None = None
    """Where the current attempt began: the restored step, 0 for a fresh start; None until that is chosen."""
    save_to: str | None = None
    parting: Parting = Parting()
    ending: Ending | None = None
    """Set once an agent has ended the job."""
    failures: Count = 0
    """Since the launch: rounds that broke because a worker died, and replacements that died before they had a rank."""
    recent_failures: Count = 0
    """Those of them that happened within `ShowJob.window_s` before the newest one; at most 1000."""
    kept_out: tuple[KeptOut, ...] = ()
    """Nodes that a node check found bad, or that are excluded because they are slow; at most `LISTED_NODES`, by name.
    """
    excluded: str = ""
    """Why `ShowJob.node` is excluded, because a rank on it is slow: its launcher has to end."""
    shares: Shares | None = None
    """How the ranks of the round share the micro-batches of a step, if not evenly."""
    rebalance: str = ""
    """Why the round is over although no member is lost: the next one has other `shares`."""


class ShowVitals(Message, frozen=True):
    """What the nodes and ranks of a job use."""

    job: str


class NodeUse(Message, frozen=True):
    """The last report of a node that has workers or waits for ranks. `age_s`: seconds since it arrived."""

    node: str
    age_s: Seconds
    cpu: CPUVitals
    memory: MemoryVitals
    network: NetworkVitals
    disk: DiskVitals | None = None


class RankUse(Message, frozen=True):
    """A live member of the round. `processes`: from its node's report. `stall`: while it makes no steps."""

    rank: Rank
    local_rank: Rank
    node: str
    incarnation: str
    step: Step = 0
    vitals: Vitals | None = None
    processes: WorkerProcesses | None = None
    stall: Stall | None = None
    phases: StepPhases | None = None
    """Of its last window."""
    straggler: Straggler | None = None


class TaskUse(Message, frozen=True):
    """A registered task of a parameter server job. `processes`: from the report of its node, `node`."""

    type: NodeType
    index: Rank
    status: NodeStatus
    resource: NodeResource = NodeResource()
    """Its limits."""
    node: str = ""
    processes: WorkerProcesses | None = None


class JobVitals(Message, frozen=True):
    job: str
    nodes: tuple[NodeUse, ...] = ()
    """By name."""
    ranks: tuple[RankUse, ...] = ()
    """By rank."""
    tasks: tuple[TaskUse, ...] = ()
    """By id."""
