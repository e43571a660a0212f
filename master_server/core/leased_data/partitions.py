"""The state of one partition: which positions were never handed out, were returned, are done, or are given up. Pure.

Every position below `next` is done, doing (in a lease, which the ledger keeps), returned or bad; positions from `next`
on were never handed out. No list is made in advance: memory is O(leases + holes), independent of the length.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right

import msgspec

from dlrover_hooks.protocol.ranges import END, Ranges

MOST_LOSSES = 8
"""A range that was lost with its holder so often is given up."""
MOST_FAILURES = 3
"""A range that its holders could not read so often is given up."""


class ReturnedRange(msgspec.Struct, gc=False):
    """Positions [lo, hi) to hand out again, and their losses and failures so far."""

    lo: int
    hi: int
    losses: int = 0
    failures: int = 0
    reason: str = ""

    @property
    def hopeless(self) -> bool:
        """It was lost or failed too often to be tried again."""
        return self.losses >= MOST_LOSSES or self.failures >= MOST_FAILURES

    @property
    def scarred(self) -> bool:
        """It was lost or failed at least once."""
        return self.losses > 0 or self.failures > 0

    def part(self, lo: int, hi: int) -> ReturnedRange:
        """The same history, fewer positions."""
        return ReturnedRange(lo=lo, hi=hi, losses=self.losses, failures=self.failures, reason=self.reason)


class PartitionLedger(msgspec.Struct):
    """One partition. `end` None: a stream whose end is not known yet."""

    begin: int
    end: int | None
    next: int
    done: Ranges = msgspec.field(default_factory=Ranges)
    returned: list[ReturnedRange] = []
    """Disjoint and in order; handed out before `next`."""
    returned_size: int = 0
    bad: list[ReturnedRange] = []
    """Given up: disjoint and in order."""


_LO = operator.attrgetter("lo")
_HI = operator.attrgetter("hi")
Span = tuple[int, int | None]
"""Positions [lo, hi), None for no end: an epoch, or the whole partition."""


def span_of(books: PartitionLedger) -> Span:
    """The whole partition."""
    return books.begin, books.end


def has_todo(books: PartitionLedger, span: Span) -> bool:
    """True if positions of `span` can be handed out. O(log k)."""
    return books.next < (END if span[1] is None else span[1]) or _first_returned(books, span) is not None


def _first_returned(books: PartitionLedger, span: Span) -> int | None:
    """Index of the first returned range that has positions of `span`."""
    if not books.returned:
        return None
    lo, hi = span
    at = bisect_right(books.returned, lo, key=_HI)
    return at if at < len(books.returned) and (hi is None or books.returned[at].lo < hi) else None


def todo(books: PartitionLedger, span: Span) -> int:
    """Estimated number of positions to hand out: an upper bound for a span with an end. O(1)."""
    lo, hi = span
    return books.returned_size + (0 if hi is None else max(0, hi - max(lo, books.next)))


def take(books: PartitionLedger, span: Span, size: int, batch: int) -> ReturnedRange | None:
    """Take at most `size` positions of `span`, returned ones first. Ranges lost repeatedly are taken in halves.

    Halving isolates the position that crashes its holders, so that few others are given up with it.
    """
    lo, hi = span
    at = _first_returned(books, span)
    if at is not None:
        piece = books.returned[at]
        start, room = max(piece.lo, lo), piece.hi if hi is None else min(piece.hi, hi)
        if piece.losses > 1:
            size = min(size, max(batch, _whole((room - start) // 2, batch)))
        return _cut_out(books, at, start, min(start + size, room))
    stop = END if hi is None else hi
    if books.next >= stop:
        return None
    if books.next < lo:  # an epoch was left before its end: its remaining positions can still be requested
        put_back(books, ReturnedRange(lo=books.next, hi=lo))
        books.next = lo
    start = books.next
    books.next = min(start + size, stop)
    return ReturnedRange(lo=start, hi=books.next)


def _whole(size: int, batch: int) -> int:
    return size // batch * batch


def _cut_out(books: PartitionLedger, at: int, lo: int, hi: int) -> ReturnedRange:
    piece = books.returned[at]
    books.returned_size -= hi - lo
    rest = [piece.part(*left) for left in ((piece.lo, lo), (hi, piece.hi)) if left[0] < left[1]]
    books.returned[at : at + 1] = rest
    return piece.part(lo, hi)


def put_back(books: PartitionLedger, piece: ReturnedRange) -> None:
    """Hand these positions out again before new ones, or never if they are hopeless."""
    hi = piece.hi if books.end is None else min(piece.hi, books.end)
    if piece.lo >= hi:
        return
    piece = piece.part(piece.lo, hi)
    rows = books.bad if piece.hopeless else books.returned
    rows.insert(bisect_left(rows, piece.lo, key=_LO), piece)
    if not piece.hopeless:
        books.returned_size += hi - piece.lo


def end_at(books: PartitionLedger, end: int) -> None:
    """Set the end of the partition. No position after it is done or bad."""
    books.end = end
    books.next = min(books.next, end)
    pieces, books.returned, books.returned_size = books.returned, [], 0
    for piece in pieces:
        put_back(books, piece)


def left(books: PartitionLedger) -> int | None:
    """Number of positions to hand out; None if the end is not known."""
    return None if books.end is None else books.returned_size + books.end - books.next


def last_used(books: PartitionLedger) -> int:
    """The end of the last range that is done or bad."""
    return max(books.done.highs[-1:] + [piece.hi for piece in books.bad[-1:]], default=books.begin)


def bad_within(books: PartitionLedger, span: Span) -> list[ReturnedRange]:
    """The parts of `span` that were given up, in order."""
    lo, hi = span
    first = bisect_right(books.bad, lo, key=_HI)
    last = len(books.bad) if hi is None else bisect_left(books.bad, hi, key=_LO)
    return [
        piece.part(max(lo, piece.lo), piece.hi if hi is None else min(hi, piece.hi)) for piece in books.bad[first:last]
    ]


def roll_back(books: PartitionLedger, cut: Ranges, lent: list[ReturnedRange]) -> None:
    """Only `cut` is done; the leases `lent` are void. Positions given up stay so; losses and failures still count."""
    books.done = Ranges.of(cut.within(books.begin, END if books.end is None else books.end))
    bad = [part for piece in books.bad for part in _missing(books.done, piece)]
    scars = [part for piece in (*books.returned, *lent) if piece.scarred for part in _missing(books.done, piece)]
    books.bad, books.returned, books.returned_size = bad, [], 0
    taken = books.done.copy()
    for piece in bad:
        taken.add(piece.lo, piece.hi)
    for piece in sorted(scars, key=_LO):
        taken.add(piece.lo, piece.hi)
        put_back(books, piece)
    books.next = max(taken.highs[-1:], default=books.begin)
    for lo, hi in taken.missing(books.begin, books.next):
        put_back(books, ReturnedRange(lo=lo, hi=hi))


def _missing(done: Ranges, piece: ReturnedRange) -> list[ReturnedRange]:
    return [piece.part(lo, hi) for lo, hi in done.missing(piece.lo, piece.hi)]
