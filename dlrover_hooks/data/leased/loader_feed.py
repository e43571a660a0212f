"""From leases to batches: what is issued to the DataLoader, and what it returns. One epoch; main process only.

The DataLoader requests batches in advance, and does so inside the call that should return one. So the batch sampler
must never wait. If there is no lease, it issues an empty batch, which is dropped when it returns. The waiting is done
here, when everything that was issued has been returned.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from dlrover_hooks.data.leased.applied_ranges import LeasePart
from dlrover_hooks.data.leased.lease_client import HeldLease, LeaseClient
from dlrover_hooks.data.leased.shard_dataset import Collated, Pick, Read, Reading, ShardDataset
from dlrover_hooks.data.order import Order
from dlrover_hooks.errors import ShardsFailed
from dlrover_hooks.protocol import LedgerState

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

log = logging.getLogger(__name__)

CHUNK = 16384
HOPELESS = 32
"""After this many failures without a success the dataset or the code is wrong, not single samples."""
_WAIT_S = 60.0


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One batch for the training loop, and its positions."""

    piece: LeasePart
    batch: Any


class FeedSampler:
    """The inner DataLoader's batch sampler: passes on what the epoch's feed issues."""

    feed: LoaderFeed | None = None

    def __iter__(self) -> Iterator[Pick]:
        return iter(()) if self.feed is None else self.feed.picks()


class Numbers:
    """Sample numbers of positions, computed in chunks of some thousand."""

    def __init__(self, order: Order) -> None:
        self._order, self._lo, self._found = order, 0, list[int]()

    def of(self, lo: int, hi: int, limit: int) -> list[int]:
        """The numbers of positions [lo, hi), all in one epoch; those up to `limit` will be requested next."""
        if not self._lo <= lo <= hi <= self._lo + len(self._found):
            epoch, place = divmod(lo, self._order.n)
            places = np.arange(place, place + min(limit - lo, max(CHUNK, hi - lo)))
            self._lo, self._found = lo, self._order.indices(epoch, places).tolist()
        return self._found[lo - self._lo : hi - self._lo]


class LoaderFeed:
    """Passes one epoch from `borrower` through the DataLoader to the loop."""

    def __init__(self, borrower: LeaseClient, order: Order | None, batch_size: int) -> None:
        self.borrower, self._batch_size = borrower, batch_size
        self.rows: Iterator[Read] = iter(())
        """The DataLoader's iterator, once it is created."""
        self._numbers = None if order is None else Numbers(order)
        self._current: HeldLease | None = None
        self._next = 0
        self._issuing = False
        """The current lease has more to issue, unless something stopped it."""
        self._issued: deque[LeasePart | None] = deque()
        self._outstanding = 0
        self._failures, self._successes = 0, 0

    # ---- to the DataLoader -------------------------------------------------------------------------------------------

    def picks(self) -> Iterator[Pick]:
        """What the DataLoader reads next; never waits, and ends with the epoch."""
        numbers, issued, size = self._numbers, self._issued, self._batch_size
        while True:
            held, lo = self._current, self._next
            if held is None or lo >= held.end or held.end != held.hi or held.lost:
                self._issuing = self._turn_over()
                if self._issuing:
                    continue
                if self.finished:
                    return
                issued.append(None)
                yield Pick()
                continue
            hi = lo + size
            if hi >= held.hi:  # batches never cross a lease's end: its last one may be short
                hi, self._issuing = held.hi, False
            self._next = hi
            issued.append(LeasePart(held, lo, hi))
            self._outstanding += 1
            yield Pick(numbers.of(lo, hi, held.hi)) if numbers is not None else Pick(None, held.partition, lo, hi)

    @property
    def finished(self) -> bool:
        """Everything of the epoch is done or quarantined, on all workers."""
        return self.borrower.state is LedgerState.FINISHED and not self.borrower.ready

    def _turn_over(self) -> bool:
        """Switch to the next lease that has something to issue. False: there is none here."""
        while (held := self.borrower.take()) is not None:
            self._current, self._next = held, held.lo
            if self._left():
                return True
        self._current = None
        return False

    def _left(self) -> bool:
        """Whether there is something to issue of the current lease."""
        held = self._current
        if held is None or self._next >= held.end or not held.whole:
            return False
        if time.monotonic() >= held.until:
            self._lapse(held)
            return False
        return True

    # ---- from the DataLoader -----------------------------------------------------------------------------------------

    def pull(self, dry: Callable[[], bool]) -> Delivery | None:
        """The next batch from `rows`. None: the epoch is finished, or `dry` returned True.

        dry: called each time when all leases here are used up and the master has no other for now; True: do not
        wait. Raises the borrower's errors (no master, a stale fence), and ShardsFailed if nothing can be read.
        """
        while True:
            if not self._outstanding and not self._issuing and not self.borrower.ready and not self._left():
                seen = self.borrower.state
                if self.finished or (self.borrower.dry and dry()):
                    return None
                self.borrower.wait(seen, _WAIT_S)
                continue
            read = next(self.rows, None)
            if read is None:
                return None
            piece = self._issued.popleft()
            if piece is not None:
                self._outstanding -= 1
                delivery = self._judge(piece, read)
                if delivery is not None:
                    return delivery

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to pull, or the epoch is finished. Raises the borrower's errors."""
        if not self.finished:
            self.borrower.wait(LedgerState.WAITING, timeout_s)

    def _judge(self, piece: LeasePart, read: Read) -> Delivery | None:
        held, lo, hi = piece.held, piece.lo, piece.hi
        if held.end != held.hi or held.lost:
            return None
        if time.monotonic() >= held.until:
            self._lapse(held)
            return None
        at = lo + read.good
        if at < hi:
            self._fall_short(held, at, read)
            if not read.good:
                return None
            piece = LeasePart(held, lo, at)
        self._successes += 1
        held.received = at
        return Delivery(piece, read.batch)

    def _fall_short(self, held: HeldLease, at: int, read: Read) -> None:
        if read.end is None:
            self._failed(held, at, read)
            return
        self.borrower.stop(held, at)
        self.borrower.ended(held.partition, read.end)

    def _failed(self, held: HeldLease, at: int, read: Read) -> None:
        self._failures += 1
        say = log.warning if self._failures == 1 else log.info
        say("%s: %s cannot be read, another worker may try: %s\n%s", self.borrower.claim, held, read.reason, read.trace)
        if not self._successes and self._failures >= HOPELESS:
            raise ShardsFailed(
                f"{self.borrower.claim}: {self._failures} reads failed and none succeeded, last: {read.reason}",
                hint=f"it is the dataset or collate_fn, not single samples:\n{read.trace}",
            )
        self.borrower.stop(held, at, failed=read.reason, failed_upto=at + read.bad)

    def _lapse(self, held: HeldLease) -> None:
        log.warning("%s: %s was not finished in time: the rest of it goes to other workers", self.borrower.claim, held)
        self.borrower.stop(held, held.received)


def shut_down(rows: object) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any."""
    end = getattr(rows, "_shutdown_workers", None)
    if end is not None:
        end()


def with_picks(loader: DataLoader[Any], dataset: ShardDataset, picks: FeedSampler) -> DataLoader[Any]:
    """A copy that reads what `picks` issues. Not constructed, so that options of newer torch are kept."""
    made = copy.copy(loader)
    vars(made).update(
        dataset=Reading(dataset.source),
        collate_fn=Collated(cast(Any, loader).collate_fn),
        sampler=picks,
        batch_sampler=picks,
        drop_last=False,
        _iterator=None,
    )
    return made
