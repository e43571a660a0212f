"""One ledger: TODO / DOING / done of a dataset, and who holds what of it. Pure, and journaled with its job.

TODO is never listed (see `partitions`), DOING is the leases, done is ranges. Taking and acknowledging is in `leases`.
Each event costs O(log k) with k leases and holes.
"""

from __future__ import annotations

import heapq
import math

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.leased_data import partitions
from dlrover_hooks.master.core.leased_data.partitions import Books, ReturnedRange, Span
from dlrover_hooks.protocol import Lease, Leases, LedgerState, OpenLedger, Quarantined
from dlrover_hooks.protocol.ranges import Ranges

MOST_TOLD = 256
"""Quarantined ranges in one reply; what is more is told as one."""


class Lent(msgspec.Struct, gc=False):
    """One lease. Positions [lo, at) are acknowledged, [at, hi) are doing. The rest is the history of its range."""

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
    """Who may take leases. `rate`: positions per second, 0 while unknown. `queued`: its entry in the heap."""

    rate: float = 0.0
    heard_at: float = 0.0
    leases: list[str] = []
    over: list[str] = []
    """Leases that ended in its last acknowledgements: said again, they change nothing."""
    queued: float = math.inf


class DatasetLedger(msgspec.Struct):
    """A dataset's state. `fence` outdates every older lease; lease numbers only count up."""

    name: str
    fingerprint: str
    epoch_length: int
    batch: int
    shard: int
    free: bool
    fence: int
    books: dict[str, Books]
    open: list[str]
    """Partitions that may have something to hand out, served in turn."""
    turn: int = 0
    issued: int = 0
    leases: dict[str, Lent] = {}
    """By their number, as text: what is journaled has such keys only."""
    holders: dict[str, Holder] = {}
    doing: dict[str, int] = {}
    """Leases by epoch."""
    heap: list[tuple[float, str]] = []
    """When to look at a holder's leases next: one entry for each holder, renewed when it comes up."""


class Ledgers(msgspec.Struct):
    """All ledgers of a job. Those whose holders sit in rounds go back to the checkpoint's cut with every attempt."""

    named: dict[str, DatasetLedger] = {}
    free: set[str] = set()
    """Incarnations that hold leases without a seat."""
    settled: int = 0
    """The attempt whose cut is known; 0 from its beginning until all have loaded."""
    parts: dict[str, dict[str, Ranges]] = {}
    """The cut as far as it was heard, by ledger and partition."""
    restored: dict[str, dict[str, str]] = {}
    """The cut of attempt `settled`, encoded once."""
    expired_at: float = 0.0


def made(event: OpenLedger, fence: int) -> DatasetLedger:
    """An empty ledger."""
    books = {part.name: Books(begin=part.begin, end=part.end, next=part.begin) for part in event.partitions}
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
    """A holder comes, or comes again: then it holds nothing any more. Returns True if something came back."""
    came_back = dismiss(ledger, incarnation, lost=False)
    ledger.holders[incarnation] = Holder(heard_at=now)
    return came_back


def dismiss(ledger: DatasetLedger, incarnation: str, *, lost: bool) -> bool:
    """A holder goes: what it has not acknowledged comes back to the front of TODO. Returns True if anything did.

    `lost`: it may have died of what it held, so that is counted.
    """
    holder = ledger.holders.pop(incarnation, None)
    if holder is None or not holder.leases:
        return False
    for number in holder.leases:
        _give_back(ledger, end_lease(ledger, number), losses=int(lost), reason=f"lost with its holder {incarnation!r}")
    return True


def expire(ledger: DatasetLedger, now: float) -> bool:
    """Leases whose time is over are lost like their holder's. Returns True if anything came back."""
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
    """When to call `expire` next; infinity if nothing is lent."""
    return ledger.heap[0][0] if ledger.heap else math.inf


def queue(ledger: DatasetLedger, incarnation: str, holder: Holder, at: float) -> None:
    """A lease of `holder` ends at `at`. An entry that comes up too early is renewed then."""
    if at < holder.queued:
        holder.queued = at
        heapq.heappush(ledger.heap, (at, incarnation))


def end_lease(ledger: DatasetLedger, number: str) -> Lent:
    """The lease is over. Taking it off its holder's list is the caller's."""
    lent = ledger.leases.pop(number)
    ledger.doing[lent.epoch] -= 1
    if not ledger.doing[lent.epoch]:
        del ledger.doing[lent.epoch]
    return lent


def _give_back(ledger: DatasetLedger, lent: Lent, *, losses: int = 0, reason: str = "") -> None:
    """The rest of an ended lease goes to the front of TODO."""
    piece = rest_of(lent)
    if losses:
        piece.losses, piece.reason = piece.losses + losses, reason
    put_back(ledger, lent.partition, piece)


def rest_of(lent: Lent) -> ReturnedRange:
    """What of the lease is doing."""
    return ReturnedRange(lo=lent.at, hi=lent.hi, losses=lent.losses, failures=lent.failures, reason=lent.reason)


def put_back(ledger: DatasetLedger, partition: str, piece: ReturnedRange) -> None:
    """To the front of TODO, or given up."""
    if piece.lo < piece.hi:
        partitions.put_back(ledger.books[partition], piece)
        if partition not in ledger.open:
            ledger.open.append(partition)


# ---- how it stands ---------------------------------------------------------------------------------------------------


def status(ledger: DatasetLedger, epoch: int, span: Span, leases: tuple[Lease, ...] = ()) -> Leases:
    """What is left of the epoch, beside `leases`; with the end of it, what was given up."""
    for name in ledger.open:
        books = ledger.books[name]
        if partitions.has_todo(books, part_of(books, span)):
            return Leases(state=LedgerState.OPEN, leases=leases)
    if str(epoch) in ledger.doing:
        return Leases(state=LedgerState.WAITING, leases=leases)
    return Leases(state=LedgerState.FINISHED, leases=leases, quarantined=quarantined(ledger, span))


def quarantined(ledger: DatasetLedger, span: Span) -> tuple[Quarantined, ...]:
    """Ranges that were given up, neighbours with one reason as one; of very many the last are told as one."""
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
    """`cut` is done and nothing else, every lease is void. Whoever goes on must open the ledger again."""
    lent: dict[str, list[ReturnedRange]] = {}
    for one in ledger.leases.values():
        lent.setdefault(one.partition, []).append(rest_of(one))
    for name, books in ledger.books.items():
        partitions.roll_back(books, cut.get(name, Ranges()), lent.get(name, []))
    ledger.fence = fence
    ledger.leases, ledger.holders, ledger.doing, ledger.heap = {}, {}, {}, []
    ledger.open, ledger.turn = sorted(ledger.books), 0


def span_of(ledger: DatasetLedger, job: str, epoch: int) -> Span:
    """Positions of `epoch`. Raises BadRequest for one that is not there."""
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
    """Raises Stale for whoever has not opened the ledger behind this fence."""
    holder = ledger.holders.get(incarnation)
    if holder is None:
        raise Stale(
            f"{incarnation!r} has not opened dataset {ledger.name!r} of job {job!r} at fence {ledger.fence}.",
            hint="Drop what is left of older leases and open the ledger.",
        )
    return holder


def part_of(books: Books, span: Span) -> Span:
    """The part of `span` that the partition has."""
    return partitions.span_of(books) if span[1] is None else span


def check_end(ledger: DatasetLedger, job: str, partition: str, end: int) -> None:
    """Raises BadRequest if the partition cannot end there. Changes nothing."""
    books = ledger.books[partition]
    last = partitions.last_used(books)
    if end < last:
        raise BadRequest(
            f"Partition {partition!r} of dataset {ledger.name!r}, job {job!r}: received end {end}, but positions up to "
            f"{last} are done.",
            hint="This is another dataset, or fewer epochs of it: give it another name, or start anew with --fresh.",
        )


def end_at(ledger: DatasetLedger, partition: str, end: int) -> None:
    """The partition ends there, whatever was said before. Leases lose what is behind."""
    partitions.end_at(ledger.books[partition], end)
    for lent in ledger.leases.values():
        if lent.partition == partition:
            lent.hi = max(lent.at, min(lent.hi, end))
    if partition not in ledger.open:
        ledger.open.append(partition)
