"""Datasets that the master lends in shards."""

from __future__ import annotations

import enum

from dlrover_hooks.protocol.base_messages import Count, Message, Rate, Seconds, Size


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
    done: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it for each struct


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
