"""Around the pure core: an event comes in, is applied, journaled, and only then answered and its effects done.

Everything here runs in one asyncio loop but two things: the journal's commit (one thread) and storage (`deposits`).
While a batch commits the next one queues: that is the whole of group commit. Queries see applied state and are answered
once all of it is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from dlrover_hooks.errors import BadRequest, HooksError, JournalFailed, MasterAway, MasterError
from dlrover_hooks.master.checkpoint_store import Storage
from dlrover_hooks.master.clock import REAL, Clock, Uptime
from dlrover_hooks.master.core import events, job_registry, views
from dlrover_hooks.master.core.effects import (
    CommitGeneration,
    Deadline,
    Effect,
    ReleaseClaims,
    RoundFormed,
    Wake,
    WriteFinished,
)
from dlrover_hooks.master.core.events import Envelope, ForgetFinished, Key, Tick
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.views import Poll
from dlrover_hooks.master.failure_detector import Liveness
from dlrover_hooks.master.journal import SNAPSHOT_EVERY, Journal
from dlrover_hooks.master.storage_worker import Deposits
from dlrover_hooks.protocol import Attach, Heartbeat, Message, Watch

log = logging.getLogger("dlrover_hooks.master")
LONGEST_POLL_S = 60.0
_PROBE_EVERY_S = 5.0
"""Who asks whether the master is ready has the journal written no more often."""
_FORGET_EVERY_S = 60.0
"""Jobs that may be forgotten are looked for no more often."""


class PendingEvent(msgspec.Struct):
    """An applied event that is not durable yet."""

    record: bytes
    reply: Message
    effects: tuple[Effect, ...]
    done: asyncio.Future[Message]


class Runtime:
    """One life of a master. Create, `start` and use it in one running loop."""

    def __init__(
        self,
        journal: Journal,
        *,
        storage: Storage,
        lease_s: float = 10.0,
        suspicion_s: float = 0.5,
        open_lease_s: float = 60.0,
        forget_after_s: float = math.inf,
        snapshot_every: int = SNAPSHOT_EVERY,
        observe_commit: Callable[[float, int], None] = lambda seconds, count: None,
        clock: Clock = REAL,
    ) -> None:
        self.journal = journal
        self.state = journal.load()
        self.life = uuid.uuid4().hex
        self.nodes = Nodes(lease_s=lease_s, suspicion_s=suspicion_s, open_lease_s=open_lease_s)
        self._deposits = Deposits(
            storage, owner=journal.owner, inform=self._inform, writes=self._writes, wall=clock.wall
        )
        self._snapshot_every, self._forget_after_s = snapshot_every, forget_after_s
        self._observe_commit = observe_commit
        self._began = self.state.now or clock.wall()
        self._uptime = Uptime(clock.monotonic, max(suspicion_s, lease_s / 10))
        self._queue: deque[PendingEvent] = deque()
        self._under_way: list[PendingEvent] = []
        self._committing: asyncio.Task[None] | None = None
        self._barrier: asyncio.Future[Message] | None = None
        self._reloading: asyncio.Future[None] | None = None
        """Until it is done `state` may be anything: it is being read from the journal."""
        self._refuses = False
        """The last write of the journal failed: events are refused, at no cost, until a probe succeeds."""
        self._written_at = -math.inf
        """When the journal was written last, or failed to be, on the loop's clock."""
        self._probing: asyncio.Task[None] | None = None
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        """By topic, in order. Each has a future of its own: to leave one that thousands share takes as many steps."""
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._forgetting: asyncio.TimerHandle | None = None
        self._forgot_at = -math.inf
        self._liveness = Liveness(self.nodes, lambda: self.state, self._inform, self._uptime)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dlrover-hooks-journal")
        self.closing = False
        self.failed = False
        """A commit ended in a bug, not in `JournalFailed`: nothing here is answered any more."""
        self.on_failure: Callable[[], None] = lambda: None

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take up what the life before left: effects without an outcome, leases of all members, claims."""
        self._loop = asyncio.get_running_loop()
        for name, job in sorted(self.state.jobs.items()):
            if job.writes and job.settings.save_to is not None:
                self._deposits.claim_again(name, job.settings.save_to, job.settings.options)
        for effect in job_registry.unfinished_effects(self.state):
            self._do(effect)
        self._liveness.start()
        if self._forget_after_s < math.inf:
            self._forget_finished()

    def release_waiters(self) -> None:
        """Send every long-poll home: the master is about to end. Call from the loop."""
        self.closing = True
        for topic in list(self._waiters):
            self._wake(topic)

    async def close(self, patience_s: float = 4.0) -> None:
        """Finish what is under way (storage within `patience_s`), then let go of everything."""
        self.release_waiters()
        self._liveness.close()
        for timer in (*self._deadlines.values(), *([self._forgetting] if self._forgetting else ())):
            timer.cancel()
        until = self._loop.time() + patience_s
        if self._committing is not None:  # its effects may begin something at storage
            await asyncio.wait([self._committing], timeout=patience_s)
        await self._deposits.drain(until - self._loop.time())
        if self._committing is not None:  # how that went
            await asyncio.wait([self._committing], timeout=patience_s)
        await self._deposits.close()
        self._writer.shutdown(wait=True)
        self.journal.close()

    # ---- events -----------------------------------------------------------------------------------------------------

    async def event(self, event: Message, key: Key | None = None) -> Message:
        """Apply, journal, answer. Raises a MasterError, then nothing was changed."""
        await self._writable()
        if isinstance(event, Attach) and event.save_to is not None:
            return await self._attach(event, event.save_to.rstrip("/"), key)
        return await asyncio.shield(self._enqueue(event, key))

    async def _attach(self, event: Attach, url: str, key: Key | None) -> Message:
        """The claim comes first. The job may have ended by then: nobody else would give it up."""
        job_registry.check_attach(self.state, event)
        await self._deposits.claim(event.job, url, event.storage_options)
        try:
            await self._writable()
            done = self._enqueue(event, key)
        except HooksError:
            self._deposits.release(event.job)
            raise
        return await asyncio.shield(done)

    def _writes(self, job: str) -> bool:
        return job_registry.writes(self.state, job)

    def _enqueue(self, event: Message, key: Key | None) -> asyncio.Future[Message]:
        now = self._now()
        record = _encoded(Envelope(now=now, event=event, key=key))
        try:
            outcome = job_registry.apply(self.state, event, now, key)
        except HooksError:
            raise
        except Exception as error:
            raise self._spoilt(event, error) from error
        done: asyncio.Future[Message] = self._loop.create_future()
        if outcome.repeated:
            self._answer_after_commits(done, outcome.reply)
            return done
        self._liveness.heard_of(event)
        self._queue.append(PendingEvent(record=record, reply=outcome.reply, effects=outcome.effects, done=done))
        self._barrier = done
        self._go_on()
        return done

    def _go_on(self) -> None:
        """Have what is queued committed, after a reload if one is due."""
        if self._committing is None:
            self._committing = self._loop.create_task(self._commit_all())
            self._committing.add_done_callback(self._committed)

    def _now(self) -> float:
        """Goes on from the journal's last event, with this life's uptime: the wall clock may be set to anything."""
        return self._began + self._uptime.seconds()

    def _answer_after_commits(self, done: asyncio.Future[Message], reply: Message) -> None:
        """The first sending of this event may not be durable yet: answer no sooner than it."""
        barrier = self._barrier
        if barrier is None or barrier.done():
            done.set_result(reply)
            return

        def settle(first: asyncio.Future[Message]) -> None:
            if done.done():
                return
            if first.cancelled() or first.exception() is not None:
                done.set_exception(first.exception() or JournalFailed("The master is ending."))
            else:
                done.set_result(reply)

        barrier.add_done_callback(settle)

    async def _commit_all(self) -> None:
        while self._queue or self._reloading is not None:
            if self._reloading is not None:
                await self._reload(self._reloading)
                continue
            batch = self._under_way = list(self._queue)
            self._queue.clear()
            full = self.journal.since_snapshot + len(batch) >= self._snapshot_every
            snapshot = self._snapshot() if full else None
            began = time.perf_counter()
            self._uptime.commit_begins()
            try:
                await self._loop.run_in_executor(
                    self._writer, self.journal.append, [entry.record for entry in batch], snapshot
                )
            except JournalFailed as error:
                self._roll_back(batch, error)
                continue
            finally:
                self._uptime.commit_ended()
            self._wrote()
            self._observe_commit(time.perf_counter() - began, len(batch))
            for entry in batch:
                _settle(entry.done, entry.reply)
                for effect in entry.effects:
                    self._perform(effect)
        self._under_way = []
        self._committing = None

    def _snapshot(self) -> bytes | None:
        """The state for the journal. None if it cannot be encoded: the events alone give it, too."""
        try:
            return job_registry.encode(self.state)
        except Exception:
            log.critical("the state cannot be encoded, so the journal keeps growing: please report this", exc_info=True)
            return None

    @property
    def _halted(self) -> bool:
        """No event is applied now."""
        return self._reloading is not None or self._refuses

    def _committed(self, task: asyncio.Task[None]) -> None:
        """A commit that raised leaves state and journal apart: end this life, the next one replays the journal."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("the journal's commit failed within; this master ends", exc_info=error)
        self.failed = True
        for entry in (*self._under_way, *self._queue):
            if not entry.done.done():
                entry.done.set_exception(_ending())
                entry.done.exception()
        self._queue.clear()
        reloading, self._reloading = self._reloading, None
        if reloading is not None:
            reloading.set_result(None)
        self.release_waiters()
        self.on_failure()

    def _check_failed(self) -> None:
        if self.failed:
            raise _ending()

    def _roll_back(self, batch: list[PendingEvent], error: JournalFailed) -> None:
        """Nothing of this batch, nor of what was applied on top of it, has happened."""
        log.error("%s", error)
        self._wrote(failed=True)
        failed = batch + list(self._queue)
        self._queue.clear()
        self._reloading = self._reloading or self._loop.create_future()
        for entry in failed:
            if not entry.done.done():
                entry.done.set_exception(JournalFailed(error.message, hint=error.hint))
                entry.done.exception()  # internal events have nobody who asks

    def _spoilt(self, event: Message, error: Exception) -> MasterError:
        """A bug left the state half changed: it is read from the journal again, and the event never happened."""
        kind = type(event).__name__
        log.critical("%s could not be applied: please report this", kind, exc_info=error)
        if self._reloading is None:
            self._reloading = self._loop.create_future()
            self._go_on()
        return MasterError(
            f"{kind} could not be applied: {type(error).__name__} in the master, see its log. Nothing was changed.",
            hint="This is a bug of dlrover-hooks: please report it with the master's log.",
        )

    async def _reload(self, done: asyncio.Future[None]) -> None:
        """The state as the journal has it, and on top of it what is queued for the next commit."""
        state = await self._loop.run_in_executor(self._writer, self.journal.load)
        for entry in self._queue:
            envelope = events.decode(entry.record)
            job_registry.apply(state, envelope.event, envelope.now, envelope.key)
        self.state, self._reloading = state, None
        self._liveness.rolled_back()
        done.set_result(None)

    async def _intact(self) -> None:
        """Wait until `state` may be used. Raises MasterAway if that will never be."""
        self._check_failed()
        while self._reloading is not None:
            await asyncio.wait([self._reloading])
            self._check_failed()

    # ---- a journal that cannot be written ----------------------------------------------------------------------------

    async def ready(self) -> str:
        """Why events are refused; empty if they are not. A journal that was not written lately is written for it."""
        if self.closing:
            return "closing"
        if self._loop.time() >= self._written_at + _PROBE_EVERY_S:
            done, _ = await asyncio.wait([self._probe()], timeout=_PROBE_EVERY_S)
            if not done:
                return "the journal does not answer"
        return "the journal cannot be written" if self._refuses else ""

    async def _writable(self) -> None:
        """Wait until an event may be applied. Raises JournalFailed, MasterAway."""
        await self._intact()
        while self._refuses:
            await asyncio.shield(self._probe())
            await self._intact()

    def _probe(self) -> asyncio.Task[None]:
        """One at a time, for all that ask meanwhile."""
        if self._probing is None:
            self._probing = self._loop.create_task(self._write_probe())
            self._probing.add_done_callback(self._probed)
        return self._probing

    async def _write_probe(self) -> None:
        await self._loop.run_in_executor(self._writer, self.journal.probe)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if not task.cancelled():
            self._wrote(failed=task.exception() is not None)

    def _wrote(self, *, failed: bool = False) -> None:
        self._refuses, self._written_at = failed, self._loop.time()

    # ---- queries ----------------------------------------------------------------------------------------------------

    async def query(self, request: Message) -> Message:
        """Answer without changing anything, as soon as what it shows is durable."""
        if isinstance(request, Heartbeat):
            self._liveness.received(request)
        reply = await self._ask(request)
        if isinstance(request, Heartbeat):
            self._liveness.beat(request)
        assert reply is not None
        return reply

    async def _ask(self, request: Message) -> Message | None:
        while True:
            await self._intact()
            reply = views.query(self.state, self.nodes, request)
            barrier = self._barrier
            if barrier is None or barrier.done():
                return reply
            await asyncio.wait([barrier])
            if barrier.cancelled() or barrier.exception() is None:
                return reply

    async def wait(self, request: Poll) -> Message:
        """A long-poll. Raises MasterAway when this master is ending: ask again."""
        await self._ask(request)
        timeout_s = None if isinstance(request, Watch) else min(max(request.timeout_s, 0.0), LONGEST_POLL_S)
        self._liveness.waits(request, timeout_s or 0.0)
        reply = None
        try:
            reply = await self._wait_until(request, None if timeout_s is None else self._loop.time() + timeout_s)
            return reply
        finally:
            if not (self.closing and isinstance(request, Watch)):  # all connections end with the master
                self._liveness.waited(request, answered=reply is not None)

    async def _wait_until(self, request: Poll, until: float | None) -> Message:
        while not self.closing:
            with self._waiting(views.topics(self.state, request)) as woken:
                reply = await self._ask(request)
                if reply is not None:
                    return reply
                left = None if until is None else until - self._loop.time()
                if left is not None and left <= 0:
                    return _nothing(request)
                await asyncio.wait([woken], timeout=left)
        raise _ending()

    @contextlib.contextmanager
    def _waiting(self, topics: tuple[str, ...]) -> Iterator[asyncio.Future[None]]:
        """A future that any of `topics` settles."""
        woken: asyncio.Future[None] = self._loop.create_future()
        for topic in topics:
            self._waiters.setdefault(topic, {})[woken] = None
        try:
            yield woken
        finally:
            for topic in topics:
                if waiters := self._waiters.get(topic):
                    waiters.pop(woken, None)
                    if not waiters:
                        del self._waiters[topic]

    def _wake(self, topic: str) -> None:
        for woken in self._waiters.pop(topic, ()):
            _settle(woken, None)

    # ---- the master's own events -------------------------------------------------------------------------------------

    def _inform(self, event: Message) -> None:
        """An event of the master's own. If the journal fails it is tried again: nobody else would."""
        if self._reloading is not None:
            self._reloading.add_done_callback(lambda _: self._inform(event))
            return
        if self._refuses:
            self._probe().add_done_callback(lambda probed: self._informed(event, probed))
            return
        try:
            done = self._enqueue(event, None)
        except HooksError as error:
            log.info("%s came too late: %s", type(event).__name__, error)
            return
        done.add_done_callback(lambda settled: self._insist(event, settled))

    def _informed(self, event: Message, probed: asyncio.Task[None]) -> None:
        if not probed.cancelled() and probed.exception() is None:
            self._inform(event)
        else:
            self._insist(event, probed)

    def _insist(self, event: Message, settled: asyncio.Future[Any]) -> None:
        if not settled.cancelled() and settled.exception() is not None and not self.closing:
            self._loop.call_later(1.0, self._inform, event)

    def _forget_finished(self) -> None:
        """Looks at all jobs now and then. It comes at each tick of the uptime, which would stand still without jobs."""
        if self.closing:
            return
        now = self._now()
        if now >= self._forgot_at + min(_FORGET_EVERY_S, self._forget_after_s / 10) and not self._halted:
            self._forgot_at, before = now, now - self._forget_after_s
            if job_registry.finished_before(self.state, before):
                with contextlib.suppress(HooksError):  # the next look finds them again
                    self._enqueue(ForgetFinished(before=before), None)
        self._forgetting = self._loop.call_later(self._uptime.tick_s, self._forget_finished)

    # ---- effects ----------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        """Its event is journaled: a bug here is no reason to doubt the state."""
        try:
            self._do(effect)
        except Exception:
            log.critical("%s could not be done: please report this", type(effect).__name__, exc_info=True)

    def _do(self, effect: Effect) -> None:
        """Called after the commit only."""
        if isinstance(effect, Wake):
            self._wake(effect.topic)
        elif isinstance(effect, Deadline):
            self._set_deadline(effect)
        elif isinstance(effect, CommitGeneration):
            self._deposits.commit(effect)
        elif isinstance(effect, RoundFormed):
            self._liveness.round_formed(effect.job)
        elif isinstance(effect, ReleaseClaims):
            self._deposits.release(effect.job)
        elif isinstance(effect, WriteFinished):
            self._deposits.finish(effect)
        else:
            raise TypeError(f"unknown effect {effect!r}")

    def _set_deadline(self, effect: Deadline) -> None:
        if (timer := self._deadlines.pop(effect.job, None)) is not None:
            timer.cancel()
        delay_s = max(0.0, effect.at - self._now())
        self._deadlines[effect.job] = self._loop.call_later(delay_s, self._inform, Tick(job=effect.job))


def _ending() -> MasterAway:
    return MasterAway("The master is ending.", hint="Ask again: it comes back on the same address.")


def _encoded(envelope: Envelope) -> bytes:
    """Before it is applied: what cannot be journaled must not happen."""
    try:
        return events.encode(envelope)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadRequest(
            f"{type(envelope.event).__name__} cannot be journaled: {error}.", hint="See /openapi.json for the bounds."
        ) from error


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _nothing(request: Message) -> Message:
    reply = views.nothing(request)
    assert reply is not None
    return reply
