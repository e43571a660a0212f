"""Taking leases from a ledger and acknowledging them. Pure; a request is checked completely before the first change.

A lease ends when it is acknowledged to its end, or when its holder returns the rest or reports a position that it
cannot read. Acknowledgements are partial and name a position: a repeated or older one changes nothing.
"""

from __future__ import annotations

import math

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.leased_data import ledger as books_of, partitions
from dlrover_hooks.master.core.leased_data.ledger import DatasetLedger, Holder, LeaseRecord
from dlrover_hooks.master.core.leased_data.partitions import PartitionLedger, ReturnedRange, Span
from dlrover_hooks.protocol import Ack, Lease, Leases, TakeLeases

FIRST_S = 600.0
"""Duration of a lease while its holder's speed is unknown."""
SHORTEST_S = 60.0
LONGEST_S = 7 * 86_400.0
PATIENCE = 8.0
"""Duration of a lease, as a multiple of the time that its holder is expected to need for it."""
WORK_S = 5.0
"""Work in a lease whose size is derived from the holder's speed."""
FIRST_BATCHES = 64
MOST_LEASES = 64
"""Most leases in one reply, and most acknowledgements in one request."""
MOST_HELD = 256
"""Most leases of one holder."""
NEWEST = 0.3
"""Weight of the newest speed in the moving average."""


def take(ledger: DatasetLedger, job: str, event: TakeLeases, now: float) -> tuple[Leases, bool]:
    """Acknowledge, then grant leases. Returns the reply, and whether waiting requests are to be evaluated again.

    Raises Stale, BadRequest; then nothing was changed.
    """
    span = books_of.span_of(ledger, job, event.epoch)
    holder = _holder(ledger, job, event)
    acks = [(str(ack.lease), ack) for ack in event.acks]
    again = [number for number, _ in acks if number in holder.over]
    if again:
        acks = [pair for pair in acks if pair[0] not in again]
    for number, ack in acks:
        _check(ledger, job, event.incarnation, number, ack)
    count, over, news = _acknowledge(ledger, holder, acks)
    if over:
        holder.over = again + over
    _measure(holder, count, event.rate, now)
    backlog = _renew(ledger, event.incarnation, holder, now) if count else _held(ledger, holder)
    leases = _lend(ledger, event, holder, span, backlog, now) if event.count else ()
    return books_of.status(ledger, event.epoch, span, leases), news


# ---- checks ----------------------------------------------------------------------------------------------------------


def _holder(ledger: DatasetLedger, job: str, event: TakeLeases) -> Holder:
    """The sender as a holder. Raises Stale if it did not open the ledger, BadRequest for an invalid request."""
    if not 0 <= event.count <= MOST_LEASES or len(event.acks) > MOST_LEASES:
        raise BadRequest(
            f"Dataset {ledger.name!r} of job {job!r}: expected 0 to {MOST_LEASES} leases and at most {MOST_LEASES} "
            f"acknowledgements, received {event.count} and {len(event.acks)}.",
            hint="Ask more often.",
        )
    if not 0.0 <= event.rate < math.inf:
        raise BadRequest(f"Dataset {ledger.name!r} of job {job!r}: {event.rate} positions per second is no speed.")
    if len(event.acks) > 1 and len({ack.lease for ack in event.acks}) < len(event.acks):
        raise BadRequest(
            f"Dataset {ledger.name!r} of job {job!r}: one lease is acknowledged twice in one request.",
            hint="Send the furthest position of each lease.",
        )
    return books_of.holder_named(ledger, job, event.incarnation)


def _check(ledger: DatasetLedger, job: str, incarnation: str, number: str, ack: Ack) -> None:
    """Raises Stale if the sender does not hold this lease, BadRequest if the positions are not in the lease."""
    lent = ledger.leases.get(number)
    if lent is None or lent.holder != incarnation:
        why = f"is held by {lent.holder!r}" if lent else "is over, or was never lent"
        raise Stale(
            f"Lease {ack.lease} of dataset {ledger.name!r}, job {job!r}, {why}; {incarnation!r} cannot acknowledge it.",
            hint="Drop the lease: what is left of it is lent to another worker.",
        )
    upto = _failed_upto(ack)
    if not lent.lo <= ack.upto <= upto <= lent.hi or (ack.failed and (ack.upto < lent.at or upto == ack.upto)):
        raise BadRequest(
            f"Lease {ack.lease} of dataset {ledger.name!r}, job {job!r}, is [{lent.lo}, {lent.hi}), acknowledged up "
            f"to {lent.at}; {incarnation!r} sent upto={ack.upto}, failed_upto={ack.failed_upto}.",
            hint="Acknowledge positions of the lease, in order.",
        )


def _failed_upto(ack: Ack) -> int:
    return (ack.failed_upto or ack.upto + 1) if ack.failed else ack.upto


# ---- acknowledging ---------------------------------------------------------------------------------------------------


def _acknowledge(ledger: DatasetLedger, holder: Holder, acks: list[tuple[str, Ack]]) -> tuple[int, list[str], bool]:
    """Returns the number of positions newly done, the leases that ended, and True if positions were returned or an
    epoch has no lease left.
    """
    count, over, news = 0, list[str](), False
    for number, ack in acks:
        lent = ledger.leases[number]
        if ack.upto > lent.at:
            ledger.books[lent.partition].done.add(lent.at, ack.upto)
            count += ack.upto - lent.at
            lent.at = ack.upto
        if lent.at < lent.hi and not ack.failed and not ack.back:
            continue
        over.append(number)
        holder.leases.remove(number)
        books_of.end_lease(ledger, number)
        news |= lent.at < lent.hi or lent.epoch not in ledger.doing
        if lent.at < lent.hi:
            _sort_rest(ledger, lent, ack)
    return count, over, news


def _sort_rest(ledger: DatasetLedger, lent: LeaseRecord, ack: Ack) -> None:
    """Return the rest of an ended lease, and count a failure of the positions that could not be read."""
    rest = books_of.rest_of(lent)
    if ack.failed:
        failed = rest.part(lent.at, _failed_upto(ack))
        failed.failures, failed.reason = failed.failures + 1, ack.failed
        books_of.put_back(ledger, lent.partition, failed)
        rest.lo = failed.hi
    books_of.put_back(ledger, lent.partition, rest)


def _measure(holder: Holder, count: int, rate: float, now: float) -> None:
    """Update the holder's speed with the rate that it reported, else from the time between its acknowledgements."""
    seen = rate
    if count:
        passed_s, holder.heard_at = now - holder.heard_at, now
        if not rate and passed_s > 0.0:
            seen = count / passed_s
    if seen:
        holder.rate = (1.0 - NEWEST) * holder.rate + NEWEST * seen if holder.rate else seen


def _within_s(holder: Holder, size: int) -> float:
    return min(max(SHORTEST_S, PATIENCE * size / holder.rate), LONGEST_S) if holder.rate else FIRST_S


def _held(ledger: DatasetLedger, holder: Holder) -> int:
    return sum(ledger.leases[number].hi - ledger.leases[number].at for number in holder.leases)


def _renew(ledger: DatasetLedger, incarnation: str, holder: Holder, now: float) -> int:
    """Extend all leases of a holder that makes progress, by their expected time. Returns its unfinished positions."""
    backlog = 0
    for number in holder.leases:
        lent = ledger.leases[number]
        backlog += lent.hi - lent.at
        lent.until = now + _within_s(holder, backlog)
        books_of.queue(ledger, incarnation, holder, lent.until)
    return backlog


# ---- lending ---------------------------------------------------------------------------------------------------------


def _lend(
    ledger: DatasetLedger, event: TakeLeases, holder: Holder, span: Span, backlog: int, now: float
) -> tuple[Lease, ...]:
    leases: list[Lease] = []
    count = min(event.count, MOST_HELD - len(holder.leases))
    while len(leases) < count and ledger.open:
        ledger.turn %= len(ledger.open)
        partition = ledger.open[ledger.turn]
        books = ledger.books[partition]
        size = _size(ledger, holder, books, span)
        piece = partitions.take(books, books_of.part_of(books, span), size, ledger.batch)
        if piece is None and ledger.epoch_length:
            break
        if piece is None:
            del ledger.open[ledger.turn]
            continue
        ledger.turn += 1
        backlog += piece.hi - piece.lo
        leases.append(_lease(ledger, event.incarnation, holder, partition, piece, _within_s(holder, backlog), now))
    return tuple(leases)


def _size(ledger: DatasetLedger, holder: Holder, books: PartitionLedger, span: Span) -> int:
    """Number of positions of the next lease, in full batches: few for a slow holder, and for all near the end."""
    batch = ledger.batch
    if ledger.shard:
        return max(batch, ledger.shard // batch * batch)
    size = int(WORK_S * holder.rate) if holder.rate else FIRST_BATCHES * batch
    if books.end is not None:
        left = partitions.todo(books, books_of.part_of(books, span))
        size = min(size, left // (4 * len(ledger.holders)))
    return max(batch, size // batch * batch)


def _lease(
    ledger: DatasetLedger,
    incarnation: str,
    holder: Holder,
    partition: str,
    piece: ReturnedRange,
    within_s: float,
    now: float,
) -> Lease:
    ledger.issued += 1
    number, until = str(ledger.issued), now + within_s
    epoch = str(piece.lo // ledger.epoch_length) if ledger.epoch_length else "0"
    ledger.leases[number] = LeaseRecord(
        incarnation, partition, epoch, piece.lo, piece.lo, piece.hi, until, piece.losses, piece.failures, piece.reason
    )
    ledger.doing[epoch] = ledger.doing.get(epoch, 0) + 1
    holder.leases.append(number)
    books_of.queue(ledger, incarnation, holder, until)
    return Lease(id=ledger.issued, partition=partition, lo=piece.lo, hi=piece.hi, within_s=within_s)
