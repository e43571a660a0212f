"""Joining and leaving rounds, heartbeats and the liveness connection, preemption."""

from __future__ import annotations

import enum

import msgspec

from dlrover_hooks.protocol.base_messages import Count, ExitCode, Message, Passed, Port, Rank, Seconds, Step
from dlrover_hooks.protocol.checkpoint_messages import Cadence, Generation
from dlrover_hooks.protocol.vitals_messages import StepPhases, Vitals


class Seat(Message, frozen=True):
    """A worker that requests a rank. `rank` is set only if another launcher (torchrun) has already fixed it."""

    incarnation: str
    local_rank: Rank
    rank: Rank | None = None


class Departure(enum.Enum):
    """Why a worker left."""

    DONE = "done"
    FAILED = "failed"
    PREEMPTED = "preempted"
    STOPPED = "stopped"


class Join(Message, frozen=True):
    """Request ranks for `seats` in the next round of `job`. Creates the job if it is unknown. The reply comes at once;
    `AwaitRound` waits for the ranks.

    `incarnation`: the sender, either an agent or the one worker itself.
    """

    job: str
    incarnation: str
    node: str
    seats: tuple[Seat, ...]
    host: str
    port: Port
    """A free port on `host`, for the process group's store if a worker here gets rank 0."""
    min_workers: Rank
    max_workers: Rank
    """0, from agents that had ranks before: both bounds stay as they are."""
    proposed_run: str
    last_call_s: Seconds = 0.3
    fresh: bool = False
    """Start a new run even if older generations of this job are found."""
    again: bool = False
    """The first join of a launch. A finished job with a `save_to` continues: it may be trained for longer."""
    sole: bool = False
    """No other agent runs on this node (the launcher holds a lock): ranks of earlier agents there are released."""
    launcher: str = ""
    """The incarnation that reaps these processes, if it is not `incarnation`: its `Exited` is accepted."""
    shrinks: bool = False
    """The job continues with the remaining workers and never grows: new workers are refused while it has members."""
    serves: bool = False
    """The master runs on this node and ends with it."""
    agents: bool = False
    """The members are agents, not workers: they do not attach, and their round trains as soon as it is formed."""


class Joined(Message, frozen=True):
    job: str
    run: str
    finished: bool = False
    finished_step: Step | None = None


class AwaitRound(Message, frozen=True):
    """Long-poll until a round newer than `after` has ranks for `incarnation`, or `timeout_s` passes."""

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class RankShare(Message, frozen=True):
    """How many micro-batches of a step `rank` runs."""

    rank: Rank
    micro_batches: Count


class Shares(Message, frozen=True):
    """An uneven distribution of a step's micro-batches: `ranks` run theirs, all others share the rest evenly.

    It is for training loaders whose step has `total` micro-batches over all ranks, and for no other ones.
    """

    total: Count
    ranks: tuple[RankShare, ...] = ()
    """By rank."""


class Seated(Message, frozen=True):
    """`round` None: no round yet, send the request again."""

    round: Count | None = None
    ranks: tuple[Rank, ...] = ()
    """Global ranks in the order of `Join.seats`."""
    world_size: Rank = 0
    node_rank: Rank = 0
    node_count: Rank = 0
    master_addr: str = ""
    master_port: Port = 0
    store_prefix: str = ""
    shares: Shares | None = None
    """None: evenly."""


class StallPolicy(enum.Enum):
    """What to restart once no rank makes steps: nothing, the rank that the others wait for, or all ranks."""

    NONE = "none"
    RANK = "rank"
    ROUND = "round"


class Stall(Message, frozen=True):
    """A rank that makes no more steps. `where`: the line of its script; `waits_in`: the collective, if it is in one.

    `busy`: its process does something, and its limit is a learned one, so it is not restarted yet.
    """

    seconds: Seconds
    where: str
    waits_in: str = ""
    restart: StallPolicy = StallPolicy.NONE
    busy: bool = False


class Heartbeat(Message, frozen=True):
    """Refreshes the lease; never journaled. `vitals`, `phases`: if they are new. `stall`: while the rank stalls."""

    job: str
    incarnation: str
    step: Step = 0
    vitals: Vitals | None = None
    stall: Stall | None = None
    phases: StepPhases | None = None


class Beat(Message, frozen=True):
    round: Count = 0
    broken: bool = False
    """The round lost a member, or is rebalanced: stop at the next step; the agent or launcher joins the next round."""
    newest_complete: Generation | None = None
    cadence: Cadence = Cadence()
    may_complete: tuple[Step, ...] = ()
    """See `Voted`."""
    parting: bool = False
    """A member is preempted: reply with `Hold`."""
    waiting: Rank = 0
    """See `Notice`."""
    interval_s: Seconds = 0.0
    """The next heartbeats follow at this interval, if the sender's own is shorter."""


class Notice(Message, frozen=True):
    """The reply to `Watch`: the round broke, the job is finished, a member of the round is preempted, or (for workers
    that recover) new workers wait.

    `waiting`: the number of workers that could be added to the current round. It grows when a member joins again.
    `rebalance`: see `JobView`; it is why the round broke.
    """

    round: Count
    broken: bool = False
    finished: bool = False
    waiting: Rank = 0
    parting: bool = False
    """See `Beat`: send a heartbeat at once."""
    rebalance: str = ""


class Watch(Message, frozen=True):
    """One open connection per worker: when it closes, the worker is suspected. Answered only when there is a notice.

    `after`: the round of the last notice of a break, so that it is sent once and the connection stays open. `waiting`:
    the number of new workers in the last notice. `parting`: the round of the last notice of a preemption; None: no such
    notices.
    """

    job: str
    incarnation: str
    after: Count = 0
    waiting: Rank = 0
    parting: Count | None = None

    def told(self, notice: Notice) -> Watch:
        """The next request, after `notice`."""
        if notice.broken or notice.finished:
            return msgspec.structs.replace(self, after=notice.round, waiting=0)
        if notice.parting:
            return msgspec.structs.replace(self, parting=notice.round)
        return msgspec.structs.replace(self, waiting=notice.waiting)


class Exited(Message, frozen=True):
    """The result of an agent's waitpid: `worker` is dead, so the suspicion period is not waited for.

    `exit_code` < 0: a signal; 0: done, also without a `Leave` (a script without hooks sends none); 75: preempted, which
    is no failure.
    """

    job: str
    incarnation: str
    worker: str
    exit_code: ExitCode
    newcomer: bool = False
    """It was started to request a rank by itself. If it never had one, its end still counts as a failure of the job."""


class Ending(Message, frozen=True):
    """An agent ends the whole job. `exit_code`: of every launcher."""

    exit_code: ExitCode
    why: str


class Leave(Message, frozen=True):
    job: str
    incarnation: str
    reason: Departure
    step: Step = 0
    ending: Ending | None = None
    """From an agent: no further round is formed. The other agents receive `Notice.finished`, and read `JobView`."""


class Preempt(Message, frozen=True):
    """`node`, or one worker on it, is to be removed within `within_s`: all members of the round leave at one step.

    Sent by a member or an agent of the round, or by what starts the nodes of a planned job.
    """

    job: str
    incarnation: str
    node: str
    within_s: Seconds
    reason: str


class Hold(Message, frozen=True):
    """This member has passed the boundary of step `passed`, and passes no later one before it has the step to leave at.

    Sent by its background thread, so that no rank waits for another one that is in a collective.
    """

    job: str
    incarnation: str
    passed: Passed


class Parting(Message, frozen=True):
    """Where all members of `round` leave: at the boundary of `step` (None: a `Hold` is still missing).

    `round` 0: no member is preempted, or the round broke before the step was agreed. `nodes`: those to be removed.
    `left_s`: seconds until the first of them is removed; in replies to events only.
    """

    round: Count = 0
    step: Count | None = None
    reason: str = ""
    nodes: tuple[str, ...] = ()
    left_s: Seconds = 0.0
    again: bool = False
    """Not agreed yet: send the request again."""


class AwaitParting(Message, frozen=True):
    """Long-poll until the step is agreed, or can no longer be agreed, or `timeout_s` passes."""

    job: str
    incarnation: str
    timeout_s: Seconds = 20.0
