"""Leases on the worker's side: a thread requests them in advance and acknowledges what is in the model.

The training thread never waits for a round trip while there is a lease left: `take` and `committed` only change lists.
Acknowledgements are sent with the next request for leases, so a shard costs one round trip. Only this thread
communicates with the master about leases: DataLoader workers get sample numbers, never a lease.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError, MasterAway, MasterError, Stale
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import LedgerState

log = logging.getLogger(__name__)

ACK_S = 5.0
"""Committed positions are acknowledged after this time at the latest, however long the lease is."""
POLL_S = 5.0
"""The longest time for which a closing thread may still be in a long-poll."""
CLOSE_S = 5.0
SHORTEST_S = 60.0
AHEAD_S = 0.25
"""This much work is kept ready if leases are shorter: one request then gets several."""
MOST_AHEAD = 16
PATIENCE = 4.0
"""On progress the master renews all leases of a worker, for at least a minute and for eight times the remaining work.
The reply does not contain the new deadline; only half of that factor is assumed here."""
MOST_ACKS = 64


class LeaseCaller(Protocol):
    """A `MasterClient`, or the master core in this process (`InProcessMaster`)."""

    def call(self, request: p.Message, *, channel: str = "main", timeout_s: float | None = None) -> Any: ...


class LeaseRequester(NamedTuple):
    """The worker and the epoch for which leases are requested."""

    job: str
    incarnation: str
    name: str
    fence: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"dataset {self.name!r} of job {self.job!r}"


class HeldLease:
    """A lease on this worker: `lo <= acked <= committed <= received <= end <= hi`.

    `end`: where this worker stops; before `hi` after a failure or when the rest is given back. `until`: after this
    (monotonic seconds) the master may have lent it to another worker. The training thread writes `committed`,
    `received` and, as the last of its fields, `end`; the borrower's thread writes the rest. So no lock is needed.
    """

    def __init__(self, lease: p.Lease, until: float) -> None:
        self.id, self.partition, self.lo, self.hi, self.until = lease.id, lease.partition, lease.lo, lease.hi, until
        self.acked = self.committed = self.received = lease.lo
        self.end = lease.hi
        self.failed, self.failed_upto = "", 0
        self.lost = False

    @property
    def whole(self) -> bool:
        """Nothing has stopped it so far."""
        return self.end == self.hi and not self.lost

    @property
    def complete(self) -> bool:
        """Everything that this worker will train of it is in the model."""
        return self.committed >= self.end

    def ack(self) -> p.Ack | None:
        """The acknowledgement to send; None if there is nothing new."""
        end, upto = self.end, self.committed
        if upto >= end:
            back = end < self.hi and not self.failed
            return p.Ack(lease=self.id, upto=end, failed=self.failed, failed_upto=self.failed_upto, back=back)
        return p.Ack(lease=self.id, upto=upto) if upto > self.acked else None

    def __str__(self) -> str:
        return f"lease {self.id}, positions [{self.lo}, {self.hi}) of partition {self.partition!r}"


class LeaseClient:
    """Owns the thread `dlrover-hooks-leases` for one epoch. All methods run on the training thread. Only `wait` and
    `close` ever wait; the others take no lock, since a thread that blocks, even briefly, loses its processor.

    Args:
        caller: sends requests to the master.
        claim: the worker and the epoch of the requests.
        lookahead: leases kept ready besides the current one; more if they are short, see `AHEAD_S`. 0: always none.
        patience_s: without an answer for this long, `error` is set.
        exact: each sample must be in the model once, so losing a lease that was trained on is an error.
        reopen: reports to the master where partitions of a stream end; called in the thread while no lease is held.
    """

    def __init__(
        self,
        caller: LeaseCaller,
        claim: LeaseRequester,
        *,
        lookahead: int = 1,
        patience_s: float = 600.0,
        exact: bool = False,
        reopen: Callable[[dict[str, int]], object] = lambda _: None,
    ) -> None:
        self.claim, self.patience_s = claim, patience_s
        self.state: LedgerState | None = None
        self.quarantined: tuple[p.Quarantined, ...] = ()
        self.error: HooksError | None = None
        self.waited_s = 0.0
        """Total time for which the training thread waited for leases."""
        self.twice: Stale | None = None
        """Set if samples would be trained twice although `exact` is set."""
        self._caller, self._lookahead, self._reopen, self._exact = caller, lookahead, reopen, exact
        self._ready: deque[HeldLease] = deque()
        self._ends: dict[str, int] = {}
        self._depth, self._low = lookahead, max(0, lookahead - 1)
        """`_depth` leases are kept ready. If no more than `_low` are left, others are requested."""
        self._starving, self._closing = True, False
        self._overdue = False
        """The next committed positions are to be acknowledged at once."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the thread; `put` never blocks."""
        self._answered = threading.Event()
        self._pace = WorkRate()
        self._held: dict[int, HeldLease] = {}
        self._told_at = time.monotonic()
        self._thread = self._start()

    def _start(self) -> BackgroundThread:
        thread = BackgroundThread(
            "dlrover-hooks-leases",
            self._run,
            where=str(self.claim),
            failed=self._fail,
            wake=lambda: self._bell.put(None),
        )
        thread.start()
        return thread

    # ---- the training thread -----------------------------------------------------------------------------------------

    def take(self) -> HeldLease | None:
        """The next lease, if one is ready. Never waits."""
        ready = self._ready
        held = ready.popleft() if ready and not self._ends else None
        self._starving = held is None
        if held is None or len(ready) <= self._low:
            self._bell.put(None)
        return held

    @property
    def ready(self) -> bool:
        """Whether `take` would return a lease."""
        return bool(self._ready) and not self._ends

    @property
    def dry(self) -> bool:
        """Nothing can be taken now: others hold the rest, the epoch is finished, or held leases must go back first."""
        return not self.ready and (bool(self._ends) or self.state in (LedgerState.WAITING, LedgerState.FINISHED))

    def wait(self, seen: LedgerState | None, timeout_s: float) -> None:
        """Wait until a lease is ready, `state` is not `seen`, or `timeout_s` passed. Raises `error`, if any."""
        began = time.monotonic()
        self._pace.waits(began)
        self._starving = True
        self._bell.put(None)
        while (left := began + timeout_s - time.monotonic()) > 0:
            self._answered.clear()
            if self.ready or self.error is not None or self.state is not seen:
                break
            self._answered.wait(left)
        now = time.monotonic()
        self.waited_s += now - began
        self._pace.goes_on(now)
        self.surface()

    def surface(self) -> None:
        """Raise the error that ended the thread, if any, once no lease is left. `twice` is raised at once."""
        if self.twice is not None:
            raise self.twice
        if self.error is not None and not self.ready:
            raise self.error

    def committed(self, held: HeldLease, upto: int) -> None:
        """Positions of `held` before `upto` are in the model."""
        self._pace.count += upto - held.committed
        held.committed = upto
        if self._overdue or (upto >= held.end and (self._ends or self.state is not LedgerState.OPEN)):
            self._bell.put(None)  # it is awaited; otherwise it is sent with the next request

    def stop(self, held: HeldLease, at: int, *, failed: str = "", failed_upto: int = 0) -> None:
        """Stop `held` at `at`: its rest goes back once everything before is committed.

        failed: why positions [at, failed_upto) could not be read.
        """
        held.failed, held.failed_upto = failed, failed_upto
        held.end = max(at, held.committed)
        self._bell.put(None)

    def ended(self, partition: str, at: int) -> None:
        """The stream's partition ends at `at`: finish the leases in work, report the end to the master, continue."""
        self._ends[partition] = at
        self._bell.put(None)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Acknowledge what is committed, give the rest back, end the thread. Idempotent.

        If the master does not answer in time, the rest is lent out again when the lease expires.
        """
        self._closing = True
        self._thread.stop(timeout_s)

    # ---- the borrower's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (request := self._next()) is not None:
                if isinstance(request, dict):
                    self._tell_ends(request)
                elif isinstance(request, p.AwaitShards):
                    self._hear(self._caller.call(request, timeout_s=self.patience_s), 0.0)
                else:
                    self._exchange(request)
        except HooksError as error:
            self._fail(error)

    def _next(self) -> p.TakeLeases | p.AwaitShards | dict[str, int] | None:
        """The next request; waits while there is none. None: the end."""
        while True:
            closing = self._closing  # read once: it must not change during this turn
            if closing or self._ends:
                self._give_up(closing)
            self._overdue = self._late_s() <= 0.0  # set before the check: later commits then wake the thread
            acks, want = self._acks(), self._want()
            waiting = self.state is LedgerState.WAITING
            if closing or self.state is LedgerState.FINISHED:
                return self._request(0, acks) if acks else None
            if (want and not waiting) or (acks and (self._overdue or self._awaited())):
                return self._request(want, acks)
            if self._ends and not self._held:
                return dict(self._ends)
            if want and not self._held:
                job, incarnation, name, fence, epoch = self.claim
                return p.AwaitShards(job, incarnation, name, fence, epoch, timeout_s=POLL_S)
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=max(0.0, self._late_s()) if self._held and not self._overdue else None)

    def _give_up(self, everything: bool) -> None:
        """Give back leases that are not begun; with `everything`, also the rest of the others."""
        while self._ready:
            held = self._ready.popleft()
            held.end = held.lo
        for held in self._held.values() if everything else ():
            if held.committed < held.end:
                held.failed, held.end = "", held.committed

    def _want(self) -> int:
        ready = len(self._ready)
        return 0 if self._ends or ready > self._low else max(0, self._depth + self._starving - ready)

    def _acks(self) -> list[p.Ack]:
        return [ack for held in self._held.values() if (ack := held.ack()) is not None][:MOST_ACKS]

    def _awaited(self) -> bool:
        """Other workers wait for a lease that is finished here."""
        parting = self._ends or self.state is LedgerState.WAITING
        return bool(parting) and any(held.complete for held in self._held.values())

    def _late_s(self) -> float:
        """Seconds until committed positions must be acknowledged."""
        return self._told_at + ACK_S - time.monotonic()

    def _request(self, count: int, acks: Iterable[p.Ack]) -> p.TakeLeases:
        self._told_at = time.monotonic()
        self._pace.measure(self._told_at)
        job, incarnation, name, fence, epoch = self.claim
        return p.TakeLeases(job, incarnation, name, fence, count, epoch, tuple(acks), self._pace.rate)

    def _look_ahead(self, size: int) -> None:
        """Compute how many leases of `size` positions to keep ready, if the work rate is known."""
        if self._lookahead and self._pace.settled:
            self._depth = max(self._lookahead, min(MOST_AHEAD, int(AHEAD_S * self._pace.rate / max(1, size))))
            self._low = max(self._lookahead - 1, self._depth // 4)

    def _tell_ends(self, ends: dict[str, int]) -> None:
        self._reopen(ends)
        self.state = None
        for name in ends:
            del self._ends[name]
        self._answered.set()

    def _exchange(self, request: p.TakeLeases) -> None:
        asked_at = time.monotonic()
        try:
            reply = self._call(request)
        except Stale:
            if not request.acks:
                raise
            self._tell_one_by_one(request)
            return
        self._told(request.acks, asked_at)
        self._hear(reply, asked_at)

    def _call(self, request: p.TakeLeases) -> p.Leases:
        channel = "leases-" + self.claim.name.replace("/", "_")
        return self._caller.call(request, channel=channel, timeout_s=self.patience_s)

    def _tell_one_by_one(self, request: p.TakeLeases) -> None:
        """A lease has expired: acknowledge each separately. If the worker itself is stale, the next request raises."""
        for ack in request.acks:
            asked_at = time.monotonic()
            try:
                self._call(self._request(0, [ack]))
            except Stale as error:
                self._lose(ack, error)
            else:
                self._told((ack,), asked_at)

    def _told(self, acks: tuple[p.Ack, ...], at: float) -> None:
        if any(ack.upto > self._held[ack.lease].acked for ack in acks):
            self._renew(at)
        for ack in acks:
            held = self._held[ack.lease]
            held.acked = ack.upto
            if held.complete and held.ack() == ack:  # if it was stopped there meanwhile, another ack is due
                del self._held[ack.lease]

    def _renew(self, at: float) -> None:
        backlog = 0
        for held in self._held.values():
            backlog += held.hi - held.acked
            held.until = at + max(SHORTEST_S, PATIENCE * backlog / self._pace.rate if self._pace.rate else 0.0)

    def _lose(self, ack: p.Ack, error: Stale) -> None:
        held = self._held.pop(ack.lease)
        held.lost = True
        lost = f"{held} is no longer ours ({error.message})"
        if self._exact and held.received > held.acked:
            self.twice = Stale(
                f"{self.claim}: {lost}; {held.received - held.acked} of its samples are in the model here already and "
                "will be trained again by the worker that gets them",
                hint="start the workers again: all go on from the checkpoint before, where they are in no model",
            )
        elif ack.upto > held.acked:
            log.warning("%s: %s; %d of its samples will be trained again", self.claim, lost, ack.upto - held.acked)

    def _hear(self, reply: p.Leases, asked_at: float) -> None:
        for lease in reply.leases:
            held = self._held[lease.id] = HeldLease(lease, asked_at + lease.within_s)
            self._ready.append(held)
        if reply.leases:
            self._look_ahead(reply.leases[-1].hi - reply.leases[-1].lo)
        self.quarantined = reply.quarantined or self.quarantined
        self.state = reply.state or self.state
        self._answered.set()

    def _fail(self, error: HooksError) -> None:
        if isinstance(error, MasterAway):
            error = MasterAway(
                f"{self.claim}: no lease to train on, and no answer from the master for {self.patience_s:g} s",
                hint=f"{error.message} Start it again: what was acknowledged is not lost",
            )
        elif isinstance(error, MasterError):
            error = type(error)(f"{self.claim}: {error.message}", hint=error.hint)
        self.error = error
        self._answered.set()


class WorkRate:
    """Positions per second of work, without waits: a moving average over about ten seconds.

    The training thread counts, the borrower's thread measures: a batch costs one addition.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.settled = False
        """`rate` was measured over at least half a second."""
        self.count = 0
        """Positions in the model in total."""
        self._idle: tuple[float, float | None] = 0.0, None
        """Seconds of all past waits, and the start of the current one. Written at once: the threads share no lock."""
        self._since, self._seen, self._seen_idle_s = time.monotonic(), 0, 0.0

    def waits(self, began: float) -> None:
        """The training thread begins to wait for a lease."""
        self._idle = self._idle[0], began

    def goes_on(self, now: float) -> None:
        """The training thread no longer waits."""
        idle_s, began = self._idle
        self._idle = idle_s + (0.0 if began is None else now - began), None

    def measure(self, now: float) -> None:
        """Update `rate` with the positions counted since the last measurement, if they suffice."""
        count, (idle_s, waits_since) = self.count, self._idle
        idle_s += 0.0 if waits_since is None else now - waits_since
        busy_s, done = now - self._since - (idle_s - self._seen_idle_s), count - self._seen
        if not done or (busy_s < 0.5 and self.rate):
            return
        found, share = done / max(busy_s, 1e-3), min(1.0, busy_s / 5.0)
        self.rate = found if not self.settled else self.rate + share * (found - self.rate)
        self.settled = self.settled or busy_s >= 0.5
        self._since, self._seen, self._seen_idle_s = now, count, idle_s
