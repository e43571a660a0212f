"""The ledger of one dataset: which positions are TODO, DOING and done, and the holders of the leases. Pure; journaled
with its job.

TODO is not stored as a list (see `partitions`), DOING is the leases, done is ranges. `leases` implements taking and
acknowledging. Each event costs O(log k) with k leases and holes.
"""

from __future__ import annotations

import heapq
import math

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.leased_data import partitions
from dlrover_hooks.master.core.leased_data.partitions import PartitionLedger, ReturnedRange, Span
from dlrover_hooks.protocol import Lease, Leases, LedgerState, OpenLedger, Quarantined
from dlrover_hooks.protocol.ranges import Ranges

MOST_TOLD = 256
"""Most quarantined ranges in one reply; further ones are merged into the last."""


class LeaseRecord(msgspec.Struct, gc=False):
    """One lease: positions [lo, at) are acknowledged, [at, hi) are DOING. The last fields are its range's history."""

    holder: str
    partition: str
    epoch: str
    """As a key of `doing`; 0 for a stream."""
    lo: int
    at: int
    hi: int
    until: float
    losses: int
    failures: int
    reason: str


class Holder(msgspec.Struct):
    """An incarnation that may take leases. `rate`: positions per second, 0 while unknown. `queued`: its heap entry."""

    rate: float = 0.0
    heard_at: float = 0.0
    leases: list[str] = []
    over: list[str] = []
    """Leases that ended with its last acknowledgements: repeated ones change nothing."""
    queued: float = math.inf


class DatasetLedger(msgspec.Struct):
    """A dataset's state. Leases with an older `fence` are void; lease numbers only increase."""

    name: str
    fingerprint: str
    epoch_length: int
    batch: int
    shard: int
    free: bool
    fence: int
    books: dict[str, PartitionLedger]
    open: list[str]
    """Partitions that may have positions to hand out, served in turn."""
    turn: int = 0
    issued: int = 0
    leases: dict[str, LeaseRecord] = {}
    """By their number as text: journaled mappings have text keys only."""
    holders: dict[str, Holder] = {}
    doing: dict[str, int] = {}
    """Number of leases by epoch."""
    heap: list[tuple[float, str]] = []
    """When to check a holder's leases next: one entry for each holder, renewed when it is popped."""


class Ledgers(msgspec.Struct):
    """All ledgers of a job. Those that are not free are rolled back to the checkpoint's cut with every attempt."""

    named: dict[str, DatasetLedger] = {}
    free: set[str] = set()
    """Incarnations that may hold leases without a rank."""
    settled: int = 0
    """The attempt whose cut is complete; 0 from an attempt's beginning until all members have loaded."""
    parts: dict[str, dict[str, Ranges]] = {}
    """The part of the cut that was reported so far, by ledger and partition."""
    restored: dict[str, dict[str, str]] = {}
    """The cut of attempt `settled`, encoded once."""
    expired_at: float = 0.0


def made(event: OpenLedger, fence: int) -> DatasetLedger:
    """An empty ledger."""
    books = {part.name: PartitionLedger(begin=part.begin, end=part.end, next=part.begin) for part in event.partitions}
    return DatasetLedger(
        name=event.name,
        fingerprint=event.fingerprint,
        epoch_length=event.epoch_length,
        batch=event.batch_size,
        shard=event.shard_size,
        free=event.free,
        fence=fence,
        books=books,
        open=sorted(books),
    )


# ---- holders ---------------------------------------------------------------------------------------------------------


def admit(ledger: DatasetLedger, incarnation: str, now: float) -> bool:
    """Add a holder. One that opens the ledger again loses its leases. Returns True if positions were returned."""
    came_back = dismiss(ledger, incarnation, lost=False)
    ledger.holders[incarnation] = Holder(heard_at=now)
    return came_back


def dismiss(ledger: DatasetLedger, incarnation: str, *, lost: bool) -> bool:
    """Remove a holder; its unacknowledged positions go to the front of TODO. Returns True if there were any.

    `lost`: its positions may have caused its death, so a loss of them is counted.
    """
    holder = ledger.holders.pop(incarnation, None)
    if holder is None or not holder.leases:
        return False
    for number in holder.leases:
        _give_back(ledger, end_lease(ledger, number), losses=int(lost), reason=f"lost with its holder {incarnation!r}")
    return True


def expire(ledger: DatasetLedger, now: float) -> bool:
    """Take expired leases back, like those of a lost holder. Returns True if there were any."""
    came_back = False
    while ledger.heap and ledger.heap[0][0] <= now:
        at, incarnation = heapq.heappop(ledger.heap)
        holder = ledger.holders.get(incarnation)
        if holder is None or holder.queued != at:
            continue
        holder.queued = math.inf
        for number in [number for number in holder.leases if ledger.leases[number].until <= now]:
            holder.leases.remove(number)
            _give_back(ledger, end_lease(ledger, number), losses=1, reason=f"not done in time by {incarnation!r}")
            came_back = True
        if holder.leases:
            queue(ledger, incarnation, holder, min(ledger.leases[number].until for number in holder.leases))
    return came_back


def due(ledger: DatasetLedger) -> float:
    """When to call `expire` next; infinity if there are no leases."""
    return ledger.heap[0][0] if ledger.heap else math.inf


def queue(ledger: DatasetLedger, incarnation: str, holder: Holder, at: float) -> None:
    """Queue the expiry of a lease of `holder` at `at`. An entry that is too early is renewed when it is popped."""
    if at < holder.queued:
        holder.queued = at
        heapq.heappush(ledger.heap, (at, incarnation))


def end_lease(ledger: DatasetLedger, number: str) -> LeaseRecord:
    """Remove a lease. The caller removes it from its holder's list."""
    lent = ledger.leases.pop(number)
    ledger.doing[lent.epoch] -= 1
    if not ledger.doing[lent.epoch]:
        del ledger.doing[lent.epoch]
    return lent


def _give_back(ledger: DatasetLedger, lent: LeaseRecord, *, losses: int = 0, reason: str = "") -> None:
    """Put the rest of an ended lease to the front of TODO."""
    piece = rest_of(lent)
    if losses:
        piece.losses, piece.reason = piece.losses + losses, reason
    put_back(ledger, lent.partition, piece)


def rest_of(lent: LeaseRecord) -> ReturnedRange:
    """The part of the lease that is DOING."""
    return ReturnedRange(lo=lent.at, hi=lent.hi, losses=lent.losses, failures=lent.failures, reason=lent.reason)


def put_back(ledger: DatasetLedger, partition: str, piece: ReturnedRange) -> None:
    """Put a range to the front of TODO, or quarantine it if it failed too often."""
    if piece.lo < piece.hi:
        partitions.put_back(ledger.books[partition], piece)
        if partition not in ledger.open:
            ledger.open.append(partition)


# ---- state -----------------------------------------------------------------------------------------------------------


def status(ledger: DatasetLedger, epoch: int, span: Span, leases: tuple[Lease, ...] = ()) -> Leases:
    """The state of the epoch, with the new `leases`; if it is finished, with its quarantined ranges."""
    for name in ledger.open:
        books = ledger.books[name]
        if partitions.has_todo(books, part_of(books, span)):
            return Leases(state=LedgerState.OPEN, leases=leases)
    if str(epoch) in ledger.doing:
        return Leases(state=LedgerState.WAITING, leases=leases)
    return Leases(state=LedgerState.FINISHED, leases=leases, quarantined=quarantined(ledger, span))


def quarantined(ledger: DatasetLedger, span: Span) -> tuple[Quarantined, ...]:
    """Ranges that were given up. Adjacent ones with the same reason are merged, and so are those past `MOST_TOLD`."""
    told: list[Quarantined] = []
    for name in sorted(ledger.books):
        books = ledger.books[name]
        for piece in partitions.bad_within(books, part_of(books, span)):
            last = told[-1] if told else None
            if last and last.partition == name and last.hi == piece.lo and last.reason == piece.reason:
                told[-1] = msgspec.structs.replace(last, hi=piece.hi)
            else:
                told.append(Quarantined(partition=name, lo=piece.lo, hi=piece.hi, reason=piece.reason))
    if len(told) <= MOST_TOLD:
        return tuple(told)
    more = told[MOST_TOLD - 1 :]
    size = sum(one.hi - one.lo for one in more)
    rest = msgspec.structs.replace(more[0], reason=f"and {len(more)} ranges more, {size} positions; {more[0].reason}")
    return (*told[: MOST_TOLD - 1], rest)


def roll_back(ledger: DatasetLedger, cut: dict[str, Ranges], fence: int) -> None:
    """Only `cut` is done, and every lease is void. Holders must open the ledger again."""
    lent: dict[str, list[ReturnedRange]] = {}
    for one in ledger.leases.values():
        lent.setdefault(one.partition, []).append(rest_of(one))
    for name, books in ledger.books.items():
        partitions.roll_back(books, cut.get(name, Ranges()), lent.get(name, []))
    ledger.fence = fence
    ledger.leases, ledger.holders, ledger.doing, ledger.heap = {}, {}, {}, []
    ledger.open, ledger.turn = sorted(ledger.books), 0


def span_of(ledger: DatasetLedger, job: str, epoch: int) -> Span:
    """Positions of `epoch`. Raises BadRequest if there is no such epoch."""
    length = ledger.epoch_length
    if not length:
        if epoch:
            raise BadRequest(f"Stream {ledger.name!r} of job {job!r} has no epochs, received epoch {epoch}.")
        return 0, None
    (books,) = ledger.books.values()
    assert books.end is not None
    if not 0 <= epoch < books.end // length:
        raise BadRequest(
            f"Dataset {ledger.name!r} of job {job!r} was opened for {books.end // length} epochs of {length} samples, "
            f"received epoch {epoch}.",
            hint="Open it for more epochs.",
        )
    return epoch * length, (epoch + 1) * length


def holder_named(ledger: DatasetLedger, job: str, incarnation: str) -> Holder:
    """The holder `incarnation`. Raises Stale if it has not opened the ledger since the last change of the fence."""
    holder = ledger.holders.get(incarnation)
    if holder is None:
        raise Stale(
            f"{incarnation!r} has not opened dataset {ledger.name!r} of job {job!r} at fence {ledger.fence}.",
            hint="Drop what is left of older leases and open the ledger.",
        )
    return holder


def part_of(books: PartitionLedger, span: Span) -> Span:
    """The part of `span` that belongs to the partition."""
    return partitions.span_of(books) if span[1] is None else span


def check_end(ledger: DatasetLedger, job: str, partition: str, end: int) -> None:
    """Raises BadRequest if the partition cannot end there. Changes nothing."""
    books = ledger.books[partition]
    last = partitions.last_used(books)
    if end < last:
        raise BadRequest(
            f"Partition {partition!r} of dataset {ledger.name!r}, job {job!r}: received end {end}, but positions up to "
            f"{last} are done.",
            hint="This is another dataset, or fewer epochs of it: give it another name, or start over with --fresh.",
        )


def end_at(ledger: DatasetLedger, partition: str, end: int) -> None:
    """Set the end of the partition, which replaces an earlier one. Leases lose the positions after it."""
    partitions.end_at(ledger.books[partition], end)
    for lent in ledger.leases.values():
        if lent.partition == partition:
            lent.hi = max(lent.at, min(lent.hi, end))
    if partition not in ledger.open:
        ledger.open.append(partition)
