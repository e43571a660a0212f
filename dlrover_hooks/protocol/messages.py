"""Every message between a worker, an agent and the master, and the one table of routes.

Client and server are both generated from `ROUTES`: a message is a frozen struct plus a row here, nothing else. Bodies
are JSON; decoding is typed (msgspec), unknown fields are ignored so that protocol N reads N+1's additions. Requests
that change state are *events*: the core applies them, the journal keeps them, and a repeated one answers what it
answered before (`Idempotency-Key: INCARNATION/CHANNEL/SEQ`).

Units: `_s` seconds, `_bytes` bytes. `now` is never in a request: the master's clock is the only one.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, ClassVar

import msgspec

PROTOCOL = 1
"""Wire version. The master speaks this one and the one before; `X-Dlrover-Hooks-Protocol` carries it."""


AGAIN, REQUEUE, BAD_NODE = 74, 75, 76
"""Exit codes of workers that mean more than a failure. 74: the master has declared it dead by mistake, start it again
(only a launcher ever sees that one). 75: it was preempted and has left. 76: this node is bad, replace it."""


# Every number of a message has bounds: what the master counts on from it still fits the journal and any JSON reader.

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
"""Up to the greatest integer that every reader of JSON keeps exactly."""
LARGEST_STEP = 1 << 52
Step = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_STEP)]
"""An optimizer step or an attempt that somebody names. The master adds to it, and the sum is a `Count`."""
Passed = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST_STEP)]
"""A step, or -1: none yet."""
LARGEST_EVERY = 1 << 40
Every = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_EVERY)]
"""Optimizer steps between two saves."""
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""A rank, or a number of workers."""
World = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""Workers of a round that has been."""
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes, or a position in a dataset."""
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ExitCode = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 32) - 1)]
Status = Annotated[int, msgspec.Meta(ge=100, le=599)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
"""Positions per second."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Anything that crosses a room: immutable and typed."""


class Generation(Message, frozen=True, order=True):
    """One checkpoint. Newest means greatest (attempt, step); `run` must agree before two may be compared."""

    attempt: Count
    step: Step
    run: str

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt}, run {self.run[:8]})"


class Source(enum.Enum):
    """Where a restore is read from."""

    MEMORY = "memory"
    """Each rank finds its image on its own node."""
    PEER = "peer"
    """In memory, too, but some node fetches images from another one."""
    STORAGE = "storage"


class Secret(Message, frozen=True):
    """What keepers of one run prove to each other that they know. It never shows in a log."""

    key: str = ""

    def __repr__(self) -> str:
        return "Secret(...)"


class KeeperAddress(Message, frozen=True):
    """Where other nodes reach the keeper of `node`, over TCP."""

    node: str
    host: str
    port: Port


class Replication(Message, frozen=True):
    """How a node's keeper takes part: it sends its images `to` that node's keeper (None: there is no other node)."""

    secret: Secret
    to: KeeperAddress | None = None


class Held(Message, frozen=True):
    """One hashed slot of a node's keeper: image of global `rank` out of `world_size` ranks, lying in `seat`'s arena.

    `home`: the node whose worker's image this is a replica of; `seat` is that worker's there.
    `sharded`: it holds parts of tensors; another world size needs the images of all ranks.
    """

    generation: Generation
    rank: Rank
    world_size: World
    seat: Rank
    slot: Rank
    sharded: bool = False
    home: str = ""


class Cadence(Message, frozen=True):
    """When to save: at steps divisible by `every`.

    `every` 0: the master does not know the step time yet. Save 1, 2, 4, 8, ... steps after `begun_step`, the step that
    the attempt began at. The first saved step >= `persist_from` is also made durable (None: nothing is due).
    """

    every: Count = 0
    persist_from: Count | None = None
    begun_step: Count = 0


class ShardFile(Message, frozen=True):
    """One rank's durable file of a generation; `chunks` are xxh3-64 hex digests of `chunk_bytes` pieces."""

    name: str
    rank: Rank
    nbytes: Size
    chunk_bytes: Size
    chunks: tuple[str, ...]


class Manifest(Message, frozen=True):
    """A generation exists in storage if and only if this lies beside its files and their sizes match."""

    job: str
    generation: Generation
    world_size: Rank
    files: tuple[ShardFile, ...]
    created_at: float
    format: Count = 1


class Restore(Message, frozen=True):
    """What every rank of a round loads."""

    generation: Generation
    world_size: World
    source: Source
    url: str | None = None
    """Folder of the checkpoint tree for STORAGE."""
    weights: bool = False
    """Only the model's weights are taken: a new run begins with them."""
    answers: tuple[Rank, ...] | None = None
    """Saved ranks whose `leases` the receiver answers for; None: local rank 0 for all images that its node holds."""


class Phase(enum.Enum):
    """Life of a round: seats are assigned, workers attach, load the restore choice, train; or the round broke."""

    ATTACHING = "attaching"
    RESTORING = "restoring"
    TRAINING = "training"
    BROKEN = "broken"


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


class VoteKind(enum.Enum):
    MEMORY = "memory"
    STORED = "stored"
    FAILED = "failed"
    """This rank cannot make the generation durable; `reason` says why. The master gives the generation up."""
    REFUSED = "refused"
    """Likewise, and trying again would not help: storage does not take it."""
    SKIPPED = "skipped"
    """This rank did not make that save: it had no slot for it."""


# ---- requests and replies -------------------------------------------------------------------------------------------


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


class Retention(Message, frozen=True):
    """Durable generations to keep: all that one of these rules names, and the newest whole one whatever they say.

    Plain values, so that a YAML file can hold them; `keep="last=2,every_steps=1000,every=1h"` is the same in one text.
    """

    last: Count = 2
    """The newest so many."""
    every_steps: Count | None = None
    """The first one at or after each multiple of so many optimizer steps."""
    every: str | None = None
    """The first one of each such span of time: a duration such as `"1h"`."""

    @property
    def every_s(self) -> float:
        """`every`, once it is canonical (`"3600s"`), in seconds; 0 if it is not given."""
        return float(self.every.removesuffix("s")) if self.every else 0.0


class Attach(Message, frozen=True):
    """A worker process is up and takes its seat. The first one names where checkpoints go."""

    job: str
    incarnation: str
    node: str
    pid: Count
    save_to: str | None = None
    storage_options: dict[str, Any] = {}
    keep: Count | Retention = 2
    save_every: Every | str = "auto"
    """Optimizer steps (int), `"auto"`, or a duration in canonical seconds such as `"90s"`."""
    persist_every: Every | str = "600s"
    resume: str = "auto"
    held: tuple[Held, ...] = ()
    """The node's slot inventory; sent by local rank 0 only."""
    stored: tuple[Manifest, ...] = ()
    """Whole generations found in storage; sent by global rank 0 only. `files` may be left empty."""
    damaged: tuple[tuple[Step, Step], ...] = ()
    """Attempt and step of those that were committed there and are not whole; like `heard`, global rank 0 sends it."""
    heard: Step = 0
    """The greatest attempt of all that lies there, whole or not: no folder's name is used twice."""
    keeper: KeeperAddress | None = None
    """The node's keeper takes part in replication; sent, like the next three, by local rank 0 only."""
    sends: bool = True
    """It keeps a replica of its images on another node. Else they only lie there to be fetched."""
    domain: str = ""
    """The failure domain of the node (rack, zone): a replica lies in another one if there is any."""
    secret: Secret = Secret()
    """Proposed; the first one is the run's."""
    recovers: bool = False
    """When its round breaks this worker keeps its process, and joins the next round for itself. Attach again, with
    False, if that turns out to be impossible in this round."""


class Attached(Message, frozen=True):
    run: str
    round: Count
    rank: Rank
    world_size: World


class AwaitPlan(Message, frozen=True):
    """Long-poll for the restore choice of the current round, newer than plan `after`."""

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class Plan(Message, frozen=True):
    """What this rank does next. `number` None: nothing yet, ask again. Numbers only count up."""

    number: Count | None = None
    round: Count = 0
    phase: Phase = Phase.ATTACHING
    attempt: Count = 0
    run: str = ""
    restore: Restore | None = None
    """RESTORING: load this, then send `Loaded`. TRAINING: what was loaded (None: a fresh start)."""
    cadence: Cadence = Cadence()
    refused: str | None = None
    """`resume="require"` found nothing: the reason to show."""
    fallbacks: tuple[str, ...] = ()
    """Generations given up on the way to this plan, with the reason each."""
    lost: Count = 0
    """`restore` is None, although there were so many checkpoints: none of them could be loaded."""
    replication: Replication | None = None
    """For local rank 0 of a node that takes part."""


class Loaded(Message, frozen=True):
    """This rank holds the restore choice (`ok`) or cannot (`reason`): then a new round is formed without it."""

    job: str
    incarnation: str
    round: Count
    ok: bool
    reason: str = ""
    cuts: dict[str, dict[str, str]] = {}
    """By ledger and partition: ranges (encoded) that the loaded images say are in the model."""


class Locate(Message, frozen=True):
    """Which keepers of this round hold `rank`'s image of `generation`, as their nodes said when they attached?"""

    job: str
    incarnation: str
    generation: Generation
    rank: Rank


class Located(Message, frozen=True):
    """`at`: the rank's own node first. `secret` opens their doors."""

    secret: Secret = Secret()
    at: tuple[KeeperAddress, ...] = ()


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


class Vote(Message, frozen=True):
    job: str
    incarnation: str
    generation: Generation
    rank: Rank
    world_size: World
    kind: VoteKind
    file: ShardFile | None = None
    reason: str = ""
    step_s: Seconds = 0.0
    """Median seconds per optimizer step here, 0 if not known yet."""
    copy_s: Seconds = 0.0
    """Seconds the save held up the step."""
    passed: Step = 0
    """Of steps before this one, this rank will vote MEMORY for none that it has not voted for by now."""


class Voted(Message, frozen=True):
    newest_complete: Generation | None = None
    newest_committed: Generation | None = None
    cadence: Cadence = Cadence()
    may_complete: tuple[Step, ...] = ()
    """Steps that may still become the newest complete one: somebody voted for them, and no rank has passed them by."""


class Partition(Message, frozen=True):
    """Positions `begin`, `begin + 1`, ... up to `end` (None: nobody knows yet) of one source."""

    name: str = ""
    begin: Size = 0
    end: Size | None = None


class OpenLedger(Message, frozen=True):
    """Have the master lend out the positions of dataset `name`; the first caller makes the ledger, others must agree.

    A bounded dataset is one partition of `epoch_length * epochs` positions. `free`: the holder is in no round and its
    work is not rolled back (asynchronous training: at least once between checkpoints).
    """

    job: str
    incarnation: str
    name: str
    fingerprint: str
    """Everything that decides which sample a position is; two that differ are refused."""
    partitions: tuple[Partition, ...]
    epoch_length: Size = 0
    """Positions of an epoch, 0 for a stream."""
    batch_size: Count = 1
    """A lease is a multiple of it where it can be."""
    shard_size: Count = 0
    """Positions of a lease; 0: from the measured speed."""
    free: bool = False


class Ledger(Message, frozen=True):
    """`fence` outdates every older lease. `done`: what the restored checkpoint holds, by partition, `encode`d.

    Only rank 0 is told `done`: it keeps it in the next checkpoints for all.
    """

    fence: Count
    done: dict[str, str] = {}


class Ack(Message, frozen=True, gc=False):
    """Positions of a lease before `upto` are in the model. Repeating one changes nothing.

    `failed`: the position at `upto` could not be read, and why; the rest goes back. `back`: the rest goes back.
    """

    lease: Count
    upto: Size
    failed: str = ""
    failed_upto: Size = 0
    """Positions [upto, failed_upto) are the ones that failed."""
    back: bool = False


class TakeLeases(Message, frozen=True):
    """Acknowledge, and ask for `count` more leases of `epoch` (0 for a stream). `rate`: positions per second here.

    At most 64 leases and 64 acknowledgements, each lease once; all of them count or, with an error, none.
    """

    job: str
    incarnation: str
    name: str
    fence: Count
    count: Count = 1
    epoch: Size = 0
    acks: tuple[Ack, ...] = ()
    rate: Rate = 0.0


class Lease(Message, frozen=True, gc=False):
    """Positions [lo, hi) of `partition`, lent for `within_s`."""

    id: Count
    partition: str
    lo: Size
    hi: Size
    within_s: Seconds


class LedgerState(enum.Enum):
    """What is left of the epoch: something to take, only what others hold, or nothing."""

    OPEN = "open"
    WAITING = "waiting"
    FINISHED = "finished"


class Quarantined(Message, frozen=True):
    """Positions that failed again and again and are not handed out any more."""

    partition: str
    lo: Size
    hi: Size
    reason: str


class Leases(Message, frozen=True):
    """`state` None: nothing new, ask again. `quarantined` is told when the epoch is finished."""

    state: LedgerState | None = None
    leases: tuple[Lease, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()


class AwaitShards(Message, frozen=True):
    """Long-poll until there is something to take of `epoch` again, or it is finished, or `timeout_s` passes."""

    job: str
    incarnation: str
    name: str
    fence: Count
    epoch: Size = 0
    timeout_s: Seconds = 20.0


class ShowLedger(Message, frozen=True):
    job: str
    name: str


class LedgerView(Message, frozen=True):
    """Positions by state. `todo` None: the stream has no end. `doing` by holder's incarnation."""

    fence: Count
    done: Size
    doing: dict[str, Size]
    todo: Size | None
    leases: Count = 0
    quarantined: tuple[Quarantined, ...] = ()


class Change(enum.Enum):
    """What becomes of a key."""

    SET = "set"
    ADD = "add"
    """`value`, a decimal number, is added to the one that is there (none: to 0)."""
    SWAP = "swap"
    """Set, if the value is `expected`; with an empty `expected` also if there is none."""
    APPEND = "append"
    DELETE = "delete"


class KeyChange(Message, frozen=True):
    how: Change
    key: str
    value: bytes = b""
    expected: bytes = b""


class ChangeKeys(Message, frozen=True):
    """Change keys of the store that lives as long as `round`, all or none. Only its members may."""

    job: str
    incarnation: str
    round: Count
    changes: tuple[KeyChange, ...]


class AwaitKeys(Message, frozen=True):
    """Long-poll until all `keys` are there, or `timeout_s` passes. Stale where one can never come: the round broke."""

    job: str
    incarnation: str
    round: Count
    keys: tuple[str, ...]
    timeout_s: Seconds = 20.0


class KeyValues(Message, frozen=True):
    """`values` None: not all keys are there, ask again. After changes: the new values, for DELETE `1` or nothing."""

    values: tuple[bytes, ...] | None = None


class ListKeys(Message, frozen=True):
    job: str
    incarnation: str
    round: Count


class KeyNames(Message, frozen=True):
    names: tuple[str, ...]


class Done(Message, frozen=True):
    """An empty success."""


class ListJobs(Message, frozen=True):
    pass


class Jobs(Message, frozen=True):
    jobs: tuple[str, ...]


class ShowJob(Message, frozen=True):
    job: str


class DeleteJob(Message, frozen=True):
    """Forget a job; its checkpoints stay. Refused (JobAlive) while it has workers, unless `force`."""

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
    vitals: Vitals | None = None
    recovers: bool = False
    """See `Attach`."""
    gone: str = ""
    """How it left: a `Departure`, `lost`, `replaced` (its agent has asked for its seat anew), or `exited` (its process
    ended with 0 before it had left)."""
    exit_code: ExitCode | None = None
    """As its launcher saw it."""


class Unstored(Message, frozen=True):
    """The newest generation that could not be made durable, because storage did not take a rank's file."""

    generation: Generation
    rank: Rank
    reason: str


class JobView(Message, frozen=True):
    job: str
    run: str
    attempt: Count
    round: Count
    phase: Phase
    step: Step
    members: tuple[MemberView, ...] = ()
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
    """An agent has given the job up."""
    failures: Count = 0
    """Since the launch: rounds that broke of a death, and replacements that died before they had a seat."""


class Problem(Message, frozen=True):
    """RFC 9457 body of every error. `type` is the error's name in `dlrover_hooks.errors`."""

    type: str
    title: str
    status: Status
    detail: str
    hint: str = ""


# ---- routes ---------------------------------------------------------------------------------------------------------


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
    Route(method="POST", path="/v1/join", request=Join, reply=Joined, event=True, summary="Ask for seats in a round."),
    Route(method="POST", path="/v1/round", request=AwaitRound, reply=Seated, waits=True, summary="Wait for ranks."),
    Route(method="POST", path="/v1/attach", request=Attach, reply=Attached, event=True, summary="Take a seat."),
    Route(
        method="POST", path="/v1/plan", request=AwaitPlan, reply=Plan, waits=True, summary="Wait for what to restore."
    ),
    Route(method="POST", path="/v1/locate", request=Locate, reply=Located, summary="Ask who holds an image."),
    Route(method="POST", path="/v1/loaded", request=Loaded, reply=Done, event=True, summary="Report the restore."),
    Route(method="POST", path="/v1/heartbeat", request=Heartbeat, reply=Beat, summary="Refresh the lease."),
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
)


class Routes:
    """`ROUTES` by request type."""

    by_request: ClassVar[dict[type[Message], Route]] = {route.request: route for route in ROUTES}
