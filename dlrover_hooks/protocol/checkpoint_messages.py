"""Generations, their files and MANIFEST; what a worker offers and restores, and its votes on saves."""

from __future__ import annotations

import enum
from typing import Any

from dlrover_hooks.protocol.base_messages import Count, Every, Message, Phase, Port, Rank, Seconds, Size, Step, World


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
    """Also in memory, but at least one node fetches images from another node."""
    STORAGE = "storage"


class Secret(Message, frozen=True):
    """The shared secret by which keepers of one run authenticate each other. Never logged."""

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
    """One hashed slot of a node's keeper: image of global `rank` out of `world_size` ranks.

    `seat`: the local rank whose segment holds it. `home`: for a replica, the node of the worker that saved it; then
    `seat` is its local rank there.
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

    `every` 0: the master does not know the step time yet. Save 1, 2, 4, 8, ... steps after `begun_step`, the first
    step of the attempt. The first saved step >= `persist_from` is also made durable (None: nothing is due).
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
    epoch: Count = 0
    """Of the leader that wrote it, where several masters share a journal; 0 otherwise."""


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
    """Saved ranks whose `leases` the receiver reports; None: local rank 0 reports all images that its node holds."""


class VoteKind(enum.Enum):
    MEMORY = "memory"
    STORED = "stored"
    FAILED = "failed"
    """This rank cannot make the generation durable, for `reason`. The master abandons the generation."""
    REFUSED = "refused"
    """As FAILED, and a retry would not help: storage refuses the file."""
    SKIPPED = "skipped"
    """This rank skipped that save: it had no free slot."""


class Retention(Message, frozen=True):
    """Durable generations to keep: each that one of these rules selects, and always the newest complete one.

    Plain values, so that a YAML file can hold them; `keep="last=2,every_steps=1000,every=1h"` is the same in one text.
    """

    last: Count = 2
    """This many of the newest."""
    every_steps: Count | None = None
    """The first one at or after each multiple of so many optimizer steps."""
    every: str | None = None
    """The first one of each such span of time: a duration such as `"1h"`."""

    @property
    def every_s(self) -> float:
        """`every`, once it is canonical (`"3600s"`), in seconds; 0 if it is not given."""
        return float(self.every.removesuffix("s")) if self.every else 0.0


class Attach(Message, frozen=True):
    """A worker process has started and takes its rank. The first one names the checkpoint URL."""

    job: str
    incarnation: str
    node: str
    pid: Count
    save_to: str | None = None
    storage_options: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it for each struct
    keep: Count | Retention = 2
    save_every: Every | str = "auto"
    """Optimizer steps (int), `"auto"`, or a duration in canonical seconds such as `"90s"`."""
    persist_every: Every | str = "600s"
    resume: str = "auto"
    held: tuple[Held, ...] = ()
    """The node's slot inventory; sent by local rank 0 only."""
    stored: tuple[Manifest, ...] = ()
    """Complete generations found in storage; sent by global rank 0 only. `files` may be left empty."""
    damaged: tuple[tuple[Step, Step], ...] = ()
    """Attempt and step of those that were committed there and are damaged; like `heard`, sent by global rank 0."""
    heard: Step = 0
    """The greatest attempt found there, damaged ones included, so that no folder name is used twice."""
    keeper: KeeperAddress | None = None
    """The node's keeper takes part in replication; sent, like the next three, by local rank 0 only."""
    sends: bool = True
    """It keeps a replica of its images on another node. Otherwise other nodes may only fetch them."""
    domain: str = ""
    """The failure domain of the node (rack, zone): a replica is placed in another one if there is one."""
    secret: Secret = Secret()
    """A proposal: the first one becomes the run's."""
    recovers: bool = False
    """When its round breaks, this worker keeps its process and joins the next round by itself. If that becomes
    impossible in this round, it attaches again with False."""


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
    """What this rank does next. `number` None: no plan yet, send the request again. Numbers only count up."""

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
    """Generations that could not be loaded on the way to this plan, each with the reason."""
    lost: Count = 0
    """The number of checkpoints of which none could be loaded, so that `restore` is None."""
    replication: Replication | None = None
    """For local rank 0 of a node that takes part in replication."""


class Loaded(Message, frozen=True):
    """This rank has loaded the chosen generation (`ok`) or cannot (`reason`): then a new round is formed without that
    generation."""

    job: str
    incarnation: str
    round: Count
    ok: bool
    reason: str = ""
    cuts: dict[str, dict[str, str]] = {}  # noqa: RUF012 - msgspec copies it for each struct
    """By ledger and partition: ranges (encoded) that are in the model according to the loaded images."""


class Locate(Message, frozen=True):
    """Request the keepers of this round that hold `rank`'s image of `generation`, as reported when they attached."""

    job: str
    incarnation: str
    generation: Generation
    rank: Rank


class Located(Message, frozen=True):
    """`at`: the rank's own node first. `secret` authenticates the connection to them."""

    secret: Secret = Secret()
    at: tuple[KeeperAddress, ...] = ()


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
    """Seconds for which the save delayed the step."""
    passed: Step = 0
    """This rank sends no further MEMORY votes for steps before this one."""


class Voted(Message, frozen=True):
    newest_complete: Generation | None = None
    newest_committed: Generation | None = None
    cadence: Cadence = Cadence()
    may_complete: tuple[Step, ...] = ()
    """Steps that may still become the newest complete one: some rank voted for them, and none has passed them without a
    vote."""


class Unstored(Message, frozen=True):
    """The newest generation that could not be made durable, because storage refused a rank's file."""

    generation: Generation
    rank: Rank
    reason: str
