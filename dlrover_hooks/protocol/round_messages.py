"""Joining and leaving rounds, heartbeats and the liveness connection, preemption."""

from __future__ import annotations

import enum

import msgspec

from dlrover_hooks.protocol.base_messages import Count, ExitCode, Message, Passed, Port, Rank, Seconds, Size, Step
from dlrover_hooks.protocol.checkpoint_messages import Cadence, Generation


class Seat(Message, frozen=True):
    """One worker to be. `rank` is set only when a foreign launcher (torchrun) has already fixed it."""

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
    """Ask for `seats` in the next round of `job`, created here if unknown. Reply at once; `AwaitRound` waits for ranks.

    `incarnation` speaks for the seats: an agent, or the one worker itself.
    """

    job: str
    incarnation: str
    node: str
    seats: tuple[Seat, ...]
    host: str
    port: Port
    """A port on `host` that is free for the process group's store if a seat here gets rank 0."""
    min_workers: Rank
    max_workers: Rank
    """0, by agents that were seated before: both bounds as they are."""
    proposed_run: str
    last_call_s: Seconds = 0.3
    fresh: bool = False
    """Start a new run even if older generations of this job are found."""
    again: bool = False
    """The first word of a launch. A finished job that has a `save_to` goes on: it may be trained for longer."""
    sole: bool = False
    """No other agent of this node lives (a launcher has made sure of that): their seats there are given up."""
    launcher: str = ""
    """Who reaps the processes of these seats, if it is not `incarnation`: its `Exited` is believed."""
    shrinks: bool = False
    """The job goes on with what is left and never grows: a newcomer is refused as long as anybody of it stands."""
    agents: bool = False
    """The seats are agents, not workers: nobody attaches, their round trains as soon as it is formed."""


class Joined(Message, frozen=True):
    job: str
    run: str
    finished: bool = False
    finished_step: Step | None = None


class AwaitRound(Message, frozen=True):
    """Long-poll until a round newer than `after` seats `incarnation`'s seats, or `timeout_s` passes."""

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class Seated(Message, frozen=True):
    """`round` None: nothing yet, ask again."""

    round: Count | None = None
    ranks: tuple[Rank, ...] = ()
    """Global ranks in the order of the joined seats."""
    world_size: Rank = 0
    node_rank: Rank = 0
    node_count: Rank = 0
    master_addr: str = ""
    master_port: Port = 0
    store_prefix: str = ""


class Vitals(Message, frozen=True):
    cpu_percent: float = 0.0
    memory_bytes: Size = 0
    gpu_percent: float | None = None
    gpu_memory_bytes: Size | None = None


class Heartbeat(Message, frozen=True):
    """Refreshes the lease; never journaled."""

    job: str
    incarnation: str
    step: Step = 0
    vitals: Vitals | None = None


class Beat(Message, frozen=True):
    round: Count = 0
    broken: bool = False
    """The round lost a member: stop at the next step, the agent or launcher re-forms it."""
    newest_complete: Generation | None = None
    cadence: Cadence = Cadence()
    may_complete: tuple[Step, ...] = ()
    """See `Voted`."""
    parting: bool = False
    """Somebody is preempted: answer with `Hold`."""
    waiting: Rank = 0
    """See `Notice`."""


class Notice(Message, frozen=True):
    """What `Watch` tells: the round broke, the job is finished, or (only to who recovers) newcomers wait.

    `waiting`: so many seats could be added to the round that trains now. It grows when a member joins again.
    """

    round: Count
    broken: bool = False
    finished: bool = False
    waiting: Rank = 0


class Watch(Message, frozen=True):
    """One open connection per worker: its end is the worker's. Answered only when there is something to tell.

    `after`: the round of the last notice of a break, so that it is told once and the connection stays open; `waiting`:
    the newcomers that were told of last.
    """

    job: str
    incarnation: str
    after: Count = 0
    waiting: Rank = 0

    def told(self, notice: Notice) -> Watch:
        """What to ask next, after `notice`."""
        if notice.broken or notice.finished:
            return msgspec.structs.replace(self, after=notice.round, waiting=0)
        return msgspec.structs.replace(self, waiting=notice.waiting)


class Exited(Message, frozen=True):
    """An agent's waitpid: `worker` is dead, no need to wait for the suspicion to pass.

    `exit_code` < 0: a signal; 0: it was done, whether it said so or not (a script without hooks does not); 75: it was
    preempted, and that is no failure.
    """

    job: str
    incarnation: str
    worker: str
    exit_code: ExitCode
    newcomer: bool = False
    """It was started to ask for a seat by itself. If it never had one, its end is a failure of the job all the same."""


class Ending(Message, frozen=True):
    """An agent's verdict for the whole job: it is not to go on. `exit_code`: of every launcher."""

    exit_code: ExitCode
    why: str


class Leave(Message, frozen=True):
    job: str
    incarnation: str
    reason: Departure
    step: Step = 0
    ending: Ending | None = None
    """Said by an agent: no round is to form any more. The other agents hear `Notice.finished`, and see `JobView`."""


class Preempt(Message, frozen=True):
    """`node`, or one worker on it, is to go within `within_s`: all members of the round leave at one step.

    Sent by a member or an agent of the round.
    """

    job: str
    incarnation: str
    node: str
    within_s: Seconds
    reason: str


class Hold(Message, frozen=True):
    """This member has passed the quiet point of step `passed`, and passes no later one before it knows where to leave.

    Its background thread promises it, so that no rank waits for another that is in a collective.
    """

    job: str
    incarnation: str
    passed: Passed


class Parting(Message, frozen=True):
    """Where all members of `round` leave: at the quiet point of `step` (None: not all have promised yet).

    `round` 0: nobody is preempted, or the round broke before it was agreed. `nodes`: those that are to go.
    `left_s`: until the first of them goes; in answers to events only.
    """

    round: Count = 0
    step: Count | None = None
    reason: str = ""
    nodes: tuple[str, ...] = ()
    left_s: Seconds = 0.0
    again: bool = False
    """Nothing yet, ask again."""


class AwaitParting(Message, frozen=True):
    """Long-poll until the step is agreed, or will not be, or `timeout_s` passes."""

    job: str
    incarnation: str
    timeout_s: Seconds = 20.0
