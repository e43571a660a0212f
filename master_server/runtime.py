"""Runs the pure core: an event is applied, then journaled, and only then answered and its effects are performed.

Everything runs in one asyncio loop except the journal's commit (one thread) and storage (`storage_tasks`). Events
that arrive during a commit form the next batch (group commit). Queries read the applied state and are answered once all
of it is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_hooks.errors import BadRequest, HooksError, JournalFailed, MasterAway, MasterError
from dlrover_hooks.master.clock import REAL, Clock, Uptime
from dlrover_hooks.master.core import events, job_registry, views
from dlrover_hooks.master.core.effects import (
    CommitGeneration,
    Deadline,
    Effect,
    PlanDue,
    ReleaseClaims,
    RoundFormed,
    Wake,
    WriteFinished,
)
from dlrover_hooks.master.core.events import Envelope, ForgetFinished, Key, Tick
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.views import Poll
from dlrover_hooks.master.failure_detector import Liveness
from dlrover_hooks.master.journal.journal_protocol import SNAPSHOT_EVERY, Journal, LeadershipLost
from dlrover_hooks.master.manifest_storage import Storage
from dlrover_hooks.master.planning import Planning
from dlrover_hooks.master.storage_tasks import CheckpointCommits
from dlrover_hooks.protocol import Attach, Beat, DeleteJob, Heartbeat, Message, NodeVitals, Watch

if TYPE_CHECKING:
    from dlrover_hooks.master.brain.client.brain_jobs import BrainJobs

log = logging.getLogger("dlrover_hooks.master")
LONGEST_POLL_S = 60.0
_PROBE_EVERY_S = 5.0
"""Shortest time between two writes of the journal that are caused by readiness checks."""
_FORGET_EVERY_S = 60.0
"""Shortest time between two searches for jobs that may be deleted."""


class PendingEvent(msgspec.Struct):
    """An applied event that is not durable yet."""

    record: bytes
    reply: Message
    effects: tuple[Effect, ...]
    done: asyncio.Future[Message]
    """The reply to the event's request, if it has one: cancelled with that request."""
    durable: asyncio.Future[None]
    """Shared by all events of one commit: done when that is durable, or has failed."""


class Runtime:
    """One process lifetime of a master. Create, `start` and use it in one running event loop.

    `leads`: False refuses every request, because another master may lead.
    """

    def __init__(
        self, journal: Journal, *, storage: Storage, lease_s: float = 10.0, suspicion_s: float = 0.5,
        open_lease_s: float = 60.0, forget_after_s: float = math.inf, snapshot_every: int = SNAPSHOT_EVERY,
        observe_commit: Callable[[float, int], None] = lambda seconds, count: None, brain: BrainJobs | None = None,
        clock: Clock = REAL, leads: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.journal = journal
        self._leads = leads
        self.state = journal.load()
        self.life = uuid.uuid4().hex
        self.nodes = Nodes(lease_s=lease_s, suspicion_s=suspicion_s, open_lease_s=open_lease_s)
        self._deposits = CheckpointCommits(
            storage, owner=journal.claims_as, inform=self._inform, writes=self._writes, wall=clock.wall
        )
        self._snapshot_every, self._forget_after_s, self._observe_commit = (
            snapshot_every,
            forget_after_s,
            observe_commit,
        )
        self._began = self.state.now or clock.wall()
        self._uptime = Uptime(clock.monotonic, max(suspicion_s, lease_s / 10))
        self._queue = deque[PendingEvent]()
        self._under_way: list[PendingEvent] = []
        self._committing: asyncio.Task[None] | None = None
        self._durable: asyncio.Future[None] | None = None
        """That of the newest commit: if it is done without an exception, all applied events are durable."""
        self._reloading: asyncio.Future[None] | None = None
        """While it is pending, `state` must not be used: it is being read from the journal."""
        self._refuses = False
        """The last write of the journal failed: events are refused without being applied until a probe succeeds."""
        self._written_at = -math.inf
        """Time of the last write of the journal, successful or not, on the loop's clock."""
        self._probing: asyncio.Task[None] | None = None
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        """By topic, in order. Each waiter has its own future: removing a callback from a shared one is O(waiters)."""
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._forgetting: asyncio.TimerHandle | None = None
        self._forgot_at = -math.inf
        self._liveness = Liveness(self.nodes, lambda: self.state, self._inform, self._uptime, self._now)
        self._planning = Planning(self.nodes, lambda: self.state, self._inform, self._now, brain)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dlrover-hooks-journal")
        self.closing = self.failed = False
        """`failed`: a commit raised something other than `JournalFailed`: every request is refused from then on."""
        self.on_failure: Callable[[], None] = lambda: None
        self.executors = self._executors()
        """Starts an effect of each type, in the loop, once its event is committed. A new effect needs a row here."""

    # ---- start and end ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Continue after a restart: effects without a journaled outcome, leases of all members, claims."""
        self._loop = asyncio.get_running_loop()
        for name, job in sorted(self.state.jobs.items()):
            if job.writes and job.settings.save_to is not None:
                self._deposits.claim_again(name, job.settings.save_to, job.settings.options)
        for effect in job_registry.unfinished_effects(self.state):
            self._do(effect)
        self._liveness.start()
        self._planning.start()
        if self._forget_after_s < math.inf:
            self._forget_finished()

    def release_waiters(self) -> None:
        """End every long-poll: the master is about to exit. Call from the loop."""
        self.closing = True
        for topic in list(self._waiters):
            self._wake(topic)

    async def close(self, patience_s: float = 4.0) -> None:
        """Finish the work under way (storage within `patience_s`), then release all resources."""
        self.release_waiters()
        self._liveness.close()
        for timer in (*self._deadlines.values(), *([self._forgetting] if self._forgetting else ())):
            timer.cancel()
        until = self._loop.time() + patience_s
        await self._planning.close(patience_s / 2)
        if self._committing is not None:  # its effects may start storage work
            await asyncio.wait([self._committing], timeout=patience_s)
        await self._deposits.drain(until - self._loop.time())
        if self._committing is not None:  # the outcome of that work
            await asyncio.wait([self._committing], timeout=patience_s)
        await self._deposits.close()
        self._writer.shutdown(wait=True)
        self.journal.close()

    # ---- events -----------------------------------------------------------------------------------------------------

    async def event(self, event: Message, key: Key | None = None) -> Message:
        """Apply and journal `event`, then return the reply. If this raises a MasterError nothing was changed.

        An event that was applied before is answered even if nothing can be written.
        """
        await self._intact()
        # for all other events `_enqueue` detects a repetition
        search = self._refuses or isinstance(event, Attach | DeleteJob)
        if search and key is not None and (reply := job_registry.repeated(self.state, event, key)) is not None:
            done: asyncio.Future[Message] = self._loop.create_future()
            self._answer_after_commits(done, reply)
            return await done
        if self._refuses:
            await self._writable()
        if isinstance(event, Attach) and event.save_to is not None:
            return await self._attach(event, event.save_to.rstrip("/"), key)
        return await self._enqueue(event, key)

    async def _attach(self, event: Attach, url: str, key: Key | None) -> Message:
        """Claim the URL first. If the event is then refused (the job may have ended) release the claim here."""
        job_registry.check_attach(self.state, event)
        await self._deposits.claim(event.job, url, event.storage_options)
        try:
            await self._writable()
            done = self._enqueue(event, key)
        except HooksError:
            self._deposits.release(event.job)
            raise
        return await done

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
        if self._durable is None or not self._queue:
            self._durable = self._loop.create_future()
        self._queue.append(PendingEvent(record, outcome.reply, outcome.effects, done, self._durable))
        self._go_on()
        return done

    def _go_on(self) -> None:
        """Start to commit the queue, after a reload if one is due, unless that is under way."""
        if self._committing is None:
            self._committing = self._loop.create_task(self._commit_all())
            self._committing.add_done_callback(self._committed)

    def _now(self) -> float:
        """Time of the journal's last event plus this process's uptime, independent of changes of the wall clock."""
        return self._began + self._uptime.seconds()

    def _answer_after_commits(self, done: asyncio.Future[Message], reply: Message) -> None:
        """Answer a repeated event. Its first occurrence may not be durable yet: wait for the newest commit."""
        durable = self._durable
        if durable is None or durable.done():
            done.set_result(reply)
            return

        def settle(durable: asyncio.Future[None]) -> None:
            if (error := durable.exception()) is None:
                _settle(done, reply)
            elif not done.done():
                done.set_exception(error)

        durable.add_done_callback(settle)

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
            _settle(batch[-1].durable, None)
        self._under_way = []
        self._committing = None

    def _snapshot(self) -> bytes | None:
        """The state for the journal. None if it cannot be encoded: it can still be replayed from the events."""
        try:
            return job_registry.encode(self.state)
        except Exception:
            log.critical("the state cannot be encoded, so the journal keeps growing: please report this", exc_info=True)
            return None

    @property
    def _halted(self) -> bool:
        """No event may be applied now."""
        return self._reloading is not None or self._refuses

    def _committed(self, task: asyncio.Task[None]) -> None:
        """After a commit that raised, state and journal differ: end this process; the next one replays the journal."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, LeadershipLost):
            log.warning("this master leads no longer: %s", error)
        else:
            log.critical("the journal's commit failed within; this master ends", exc_info=error)
        self.failed = True
        for entry in (*self._under_way, *self._queue):
            _fail_entry(entry, _ending)
        self._queue.clear()
        reloading, self._reloading = self._reloading, None
        if reloading is not None:
            reloading.set_result(None)
        self.release_waiters()
        self.on_failure()

    def _check_failed(self) -> None:
        if self.failed or not self._leads():
            raise _ending()

    def _roll_back(self, batch: list[PendingEvent], error: JournalFailed) -> None:
        """Undo this batch and the events applied after it: fail their requests and reload the state."""
        log.error("%s", error)
        self._wrote(failed=True)
        failed = batch + list(self._queue)
        self._queue.clear()
        self._reloading = self._reloading or self._loop.create_future()
        for entry in failed:
            _fail_entry(entry, lambda: JournalFailed(error.message, hint=error.hint))

    def _spoilt(self, event: Message, error: Exception) -> MasterError:
        """A bug may have left the state half changed: reload it from the journal, without the event."""
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
        """Read the state from the journal and apply the queued events to it."""
        state = await self._loop.run_in_executor(self._writer, self.journal.load)
        for entry in self._queue:
            envelope = events.decode(entry.record)
            job_registry.apply(state, envelope.event, envelope.now, envelope.key)
        self.state, self._reloading = state, None
        self._liveness.rolled_back()
        done.set_result(None)

    async def _intact(self) -> None:
        """Wait until `state` may be used. Raises MasterAway if this master has failed."""
        self._check_failed()
        while self._reloading is not None:
            await asyncio.wait([self._reloading])
            self._check_failed()

    # ---- a journal that cannot be written ----------------------------------------------------------------------------

    async def ready(self) -> str:
        """Why events are refused; empty if they are accepted. Writes to the journal if the last write is not recent."""
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
        """The probe under way, else a new one: all callers share it."""
        if self._probing is None:
            self._probing = self._loop.create_task(self._write_probe())
            self._probing.add_done_callback(self._probed)
        return self._probing

    async def _write_probe(self) -> None:
        await self._loop.run_in_executor(self._writer, self.journal.probe)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if task.cancelled():
            return
        self._wrote(failed=(error := task.exception()) is not None)
        if isinstance(error, LeadershipLost):
            self._fail(error)

    def _wrote(self, *, failed: bool = False) -> None:
        self._refuses, self._written_at = failed, self._loop.time()

    # ---- queries ----------------------------------------------------------------------------------------------------

    async def query(self, request: Message) -> Message:
        """Answer without changing the state, once the state that was read is durable."""
        if isinstance(request, Heartbeat):
            self._liveness.received(request)
        reply = await self._ask(request)
        if isinstance(reply, Beat) and isinstance(request, Heartbeat):
            self._liveness.beat(request, reply.interval_s)
        elif isinstance(request, NodeVitals):
            self._liveness.reported(request)
        assert reply is not None
        return reply

    async def _ask(self, request: Message) -> Message | None:
        while True:
            await self._intact()
            reply = views.query(self.state, self.nodes, request, self._uptime.seconds())
            durable = self._durable
            if durable is None or durable.done():
                return reply
            await asyncio.wait([durable])
            if durable.exception() is None:
                return reply

    async def wait(self, request: Poll) -> Message:
        """Answer a long-poll. Raises MasterAway when this master is ending; the client then sends it again."""
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
        """The answer. Thousands of these are open: what they hold counts, so there is no `asyncio.wait` in it."""
        while not self.closing:
            topics, woken = views.topics(self.state, request), self._loop.create_future()
            for topic in topics:
                self._waiters.setdefault(topic, {})[woken] = None
            timer: asyncio.TimerHandle | None = None
            try:
                reply = await self._ask(request)
                if reply is not None:
                    return reply
                if until is not None:
                    if (left_s := until - self._loop.time()) <= 0:
                        return _nothing(request)
                    timer = self._loop.call_later(left_s, _settle, woken, None)
                await woken
            finally:
                if timer is not None:
                    timer.cancel()
                self._wait_no_more(topics, woken)
        raise _ending()

    def _wait_no_more(self, topics: tuple[str, ...], woken: asyncio.Future[None]) -> None:
        for topic in topics:
            if waiters := self._waiters.get(topic):
                waiters.pop(woken, None)
                if not waiters:
                    del self._waiters[topic]

    def _wake(self, topic: str) -> None:
        for woken in self._waiters.pop(topic, ()):
            _settle(woken, None)

    # ---- internal events ---------------------------------------------------------------------------------------------

    def _inform(self, event: Message) -> None:
        """Apply an internal event of the master. If the journal fails it is tried again: no client would resend it."""
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
        """Delete old finished jobs now and then. Runs at every tick: without jobs nothing else advances the uptime."""
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
        """Do `effect`. Its event is journaled, so an exception here is logged and does not affect the state."""
        try:
            self._do(effect)
        except Exception:
            log.critical("%s could not be done: please report this", type(effect).__name__, exc_info=True)

    def _do(self, effect: Effect) -> None:
        """Start `effect`. Called only after its event is committed."""
        self.executors[type(effect)](effect)

    def _executors(self) -> dict[type[Effect], Callable[[Any], object]]:
        return {
            Wake: lambda effect: self._wake(effect.topic),
            Deadline: self._set_deadline,
            PlanDue: lambda effect: self._planning.due(effect.job),
            RoundFormed: lambda effect: self._liveness.round_formed(effect.job),
            CommitGeneration: self._deposits.commit,
            WriteFinished: self._deposits.finish,
            ReleaseClaims: lambda effect: self._deposits.release(effect.job),
        }

    def _set_deadline(self, effect: Deadline) -> None:
        if (timer := self._deadlines.pop(effect.job, None)) is not None:
            timer.cancel()
        if effect.at < math.inf:
            delay_s = max(0.0, effect.at - self._now())
            self._deadlines[effect.job] = self._loop.call_later(delay_s, self._inform, Tick(job=effect.job))


def _ending() -> MasterAway:
    return MasterAway("The master is ending.", hint="Ask again: it comes back on the same address.")


def _encoded(envelope: Envelope) -> bytes:
    """The record of an event, made before it is applied: one that cannot be journaled is refused with BadRequest."""
    try:
        return events.encode(envelope)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadRequest(
            f"{type(envelope.event).__name__} cannot be journaled: {error}.", hint="See /openapi.json for the bounds."
        ) from error


def _fail_entry(entry: PendingEvent, error: Callable[[], Exception]) -> None:
    for future in (entry.done, entry.durable):
        if not future.done():
            future.set_exception(error())
            future.exception()  # internal events have no request that retrieves it


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _nothing(request: Message) -> Message:
    reply = views.nothing(request)
    assert reply is not None
    return reply
