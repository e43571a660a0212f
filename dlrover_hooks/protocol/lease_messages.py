"""Datasets that the master lends in shards."""

from __future__ import annotations

import enum

from dlrover_hooks.protocol.base_messages import Count, Message, Rate, Seconds, Size


class Partition(Message, frozen=True):
    """Positions `begin`, `begin + 1`, ... up to `end` (None: not known yet) of one source."""

    name: str = ""
    begin: Size = 0
    end: Size | None = None


class OpenLedger(Message, frozen=True):
    """Request that the master lends positions of dataset `name`. The first request creates the ledger; later ones must
    agree with it.

    A bounded dataset is one partition of `epoch_length * epochs` positions. `free`: the holder is in no round and its
    work is not rolled back (asynchronous training: at least once between checkpoints).
    """

    job: str
    incarnation: str
    name: str
    fingerprint: str
    """Everything that decides which sample a position is; a different one is refused."""
    partitions: tuple[Partition, ...]
    epoch_length: Size = 0
    """Positions of an epoch, 0 for a stream."""
    batch_size: Count = 1
    """The length of a lease is a multiple of it where possible."""
    shard_size: Count = 0
    """Positions of a lease; 0: derived from the measured speed."""
    free: bool = False


class Ledger(Message, frozen=True):
    """`fence` outdates every older lease. `done`: what the restored checkpoint holds, by partition, `encode`d.

    Only rank 0 receives `done`: it writes it into the next checkpoints for all ranks.
    """

    fence: Count
    done: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it for each struct


class Ack(Message, frozen=True, gc=False):
    """Positions of a lease before `upto` are in the model. Repeating one changes nothing.

    `failed`: why the position at `upto` could not be read; the rest is returned. `back`: the rest is returned.
    """

    lease: Count
    upto: Size
    failed: str = ""
    failed_upto: Size = 0
    """Positions [upto, failed_upto) are the ones that failed."""
    back: bool = False


class TakeLeases(Message, frozen=True):
    """Acknowledge, and request `count` more leases of `epoch` (0 for a stream). `rate`: positions per second here.

    At most 64 leases and 64 acknowledgements, each lease once; either all of them take effect or, on an error, none.
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
    """What is left of the epoch: free positions, only positions that other workers hold, or nothing."""

    OPEN = "open"
    WAITING = "waiting"
    FINISHED = "finished"


class Quarantined(Message, frozen=True):
    """Positions that failed repeatedly and are no longer handed out."""

    partition: str
    lo: Size
    hi: Size
    reason: str


class Leases(Message, frozen=True):
    """`state` None: no change, send the request again. `quarantined` is filled when the epoch is finished."""

    state: LedgerState | None = None
    leases: tuple[Lease, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()


class AwaitShards(Message, frozen=True):
    """Long-poll until `epoch` has free positions again, or is finished, or `timeout_s` passes."""

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
