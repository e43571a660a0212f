"""The master's pure core in this process: for a single worker without a master, and as the fake for tests.

Same interface as `MasterClient`. There is no journal and no network; one lock makes it safe for any thread. A forked
child must not use it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout
from typing import Any, Protocol

from dlrover_hooks.errors import HooksError, MasterError
from dlrover_hooks.master.core import heartbeats, job_registry, node_vitals, views
from dlrover_hooks.master.core.effects import CommitGeneration, Deadline, Effect, WriteFinished
from dlrover_hooks.master.core.events import CommitFailed, Committed, FinishWritten, Key, Tick
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.manifest_storage import HeldUrl, NoStorage, Storage, release
from dlrover_hooks.protocol import (
    Attach,
    Beat,
    Heartbeat,
    Message,
    NodeVitals,
    Notice,
    Routes,
    Watch,
)

log = logging.getLogger("dlrover_hooks")

_STORAGE_END_S = 30.0


class TimeSource(Protocol):
    """The clock of an in-process master."""

    def now(self) -> float:
        """Seconds since the epoch; never goes back."""
        ...

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        """Wait, with the lock held, for `changed` or until `timeout_s` of this clock has passed. May return early."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """See `TimeSource`."""
        return time.monotonic() + self._offset

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        """See `TimeSource`."""
        changed.wait(timeout_s)


class InProcessWatch:
    """One watch; `close` ends it, as closing a liveness connection does."""

    def __init__(self, alone: InProcessMaster, request: Watch, on_notice: Callable[[Notice], None]) -> None:
        self.alone, self.request, self.on_notice = alone, request, on_notice

    def close(self) -> None:
        """Idempotent."""
        self.alone.unwatch(self)


class InProcessMaster:
    """A complete master in this process.

    Args:
        clock: real time unless a test passes its own.
        storage: where manifests are written; None: no job of this master may have a `save_to`.
        lease_s: a worker without heartbeats for this long is declared dead; by default never, since it is this process.
        inline: write manifests in the calling thread instead of a separate one.
    """

    def __init__(
        self,
        *,
        clock: TimeSource | None = None,
        storage: Storage | None = None,
        lease_s: float = math.inf,
        suspicion_s: float = math.inf,
        inline: bool = False,
    ) -> None:
        self.state = Master()
        self.nodes = Nodes(lease_s=lease_s, suspicion_s=suspicion_s)
        self.clock = clock or WallClock()
        self._storage = storage or NoStorage()
        self._changed = threading.Condition(threading.RLock())
        self._deadlines: dict[str, float] = {}
        self._claims: dict[tuple[str, str], HeldUrl] = {}
        self._ears: list[InProcessWatch] = []
        self._storer = None if inline else ThreadPoolExecutor(1, thread_name_prefix="dlrover-hooks-storage")
        self._storing: set[Future[None]] = set()

    def call(
        self,
        request: Message,
        *,
        channel: str = "main",
        timeout_s: float | None = None,
        again: bool = True,
        key: Key | None = None,
    ) -> Any:
        """The reply of the request's route. Raises the same errors as a call to a remote master."""
        del channel, again
        row = Routes.by_request[type(request)]
        if isinstance(request, Attach) and request.save_to is not None:
            self._claim(request)
        with self._changed:
            self._catch_up()
            if row.event:
                reply = self._apply(request, key)
            elif row.waits:
                reply = self._wait(request, timeout_s)
            else:
                reply = views.query(self.state, self.nodes, request, self.clock.now())
                if isinstance(request, Heartbeat) and isinstance(reply, Beat):
                    self._beat(request, reply.interval_s)
                elif isinstance(request, NodeVitals):
                    node_vitals.keep(self.nodes, request, self.clock.now())
        self._tell()
        return reply

    def watch(
        self,
        job: str,
        on_notice: Callable[[Notice], None],
        on_error: Callable[[MasterError], None] | None = None,
        on_failure: Callable[[HooksError], object] | None = None,
        *,
        incarnation: str = "",
    ) -> InProcessWatch:
        """Report broken rounds and the end of `job`. Callbacks run in the thread that caused them, without locks."""
        del on_error, on_failure  # no request can fail, and a callback's error is raised to the call that caused it
        ear = InProcessWatch(self, Watch(job=job, incarnation=incarnation, parting=0), on_notice)
        with self._changed:
            self._ears.append(ear)
            if incarnation:
                heartbeats.opened(self.nodes, (job, incarnation), self.clock.now())
        return ear

    def unwatch(self, ear: InProcessWatch) -> None:
        """Remove a watch."""
        with self._changed:
            if ear in self._ears:
                self._ears.remove(ear)
                heartbeats.closed(self.nodes, (ear.request.job, ear.request.incarnation), self.clock.now())

    def close(self) -> None:
        """Wait for pending writes to storage, release claims. Idempotent."""
        if self._storer is not None:
            for future in list(self._storing):
                try:
                    future.result(timeout=_STORAGE_END_S)
                except (TimeoutError, FutureTimeout):
                    log.warning("storage has not answered for %g s at the end: what it was to write is not waited for",
                                _STORAGE_END_S)  # fmt: skip
                    break
            self._storer.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            claims, self._claims = self._claims, {}
        for hold in claims.values():
            release(hold)

    def step(self) -> None:
        """Process deadlines and failure verdicts that are due by now. Tests call it after moving their clock."""
        with self._changed:
            self._catch_up()
            self._changed.notify_all()
        self._tell()

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _apply(self, event: Message, key: Key | None = None) -> Message:
        outcome = job_registry.apply(self.state, event, self.clock.now(), key)
        for effect in outcome.effects:
            self._do(effect)
        if outcome.effects:
            self._changed.notify_all()
        return outcome.reply

    def _catch_up(self) -> None:
        now = self.clock.now()
        for job in [job for job, at in self._deadlines.items() if at <= now]:
            del self._deadlines[job]
            if job in self.state.jobs:
                self._apply(Tick(job=job))
        for lost in heartbeats.verdicts(self.nodes, now):
            if lost.job in self.state.jobs:
                self._apply(lost)

    def _wait(self, request: Message, timeout_s: float | None) -> Message | None:
        asked_s = getattr(request, "timeout_s", math.inf)
        until = self.clock.now() + min(asked_s, math.inf if timeout_s is None else timeout_s)
        while (reply := views.query(self.state, self.nodes, request)) is None:
            now = self.clock.now()
            if now >= until:
                return views.nothing(request)
            due = min(self._deadlines.values(), default=math.inf)
            self.clock.wait(self._changed, min(until - now, max(0.0, due - now), 60.0))
            self._catch_up()
        return reply

    def _beat(self, request: Heartbeat, told_s: float) -> None:
        name, now = (request.job, request.incarnation), self.clock.now()
        step, vitals, stall, phases = request.step, request.vitals, request.stall, request.phases
        heartbeats.beat(self.nodes, name, now, step=step, vitals=vitals, stall=stall, phases=phases, told_s=told_s)

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Deadline):
            self._deadlines[effect.job] = effect.at
        elif isinstance(effect, CommitGeneration):
            self._store(self._commit, effect)
        elif isinstance(effect, WriteFinished):
            self._store(self._finish, effect)

    # ---- storage -----------------------------------------------------------------------------------------------------

    def _claim(self, event: Attach) -> None:
        url = (event.save_to or "").rstrip("/")
        with self._changed:
            if (event.job, url) not in self._claims and event.job in self.state.jobs:
                hold = self._storage.claim(url, event.storage_options, event.job, f"process of job {event.job}")
                self._claims[event.job, url] = hold

    def _store(self, work: Callable[[Any], None], effect: Effect) -> None:
        if self._storer is None:
            work(effect)
            return
        future = self._storer.submit(work, effect)
        self._storing.add(future)
        future.add_done_callback(self._storing.discard)

    def _commit(self, effect: CommitGeneration) -> None:
        generation = effect.manifest.generation
        try:
            self._storage.commit(effect.url, effect.options, effect.manifest, effect.keep)
        except Exception as error:  # whatever storage raised is reported to the job
            outcome: Message = CommitFailed(job=effect.job, generation=generation, reason=str(error))
        else:
            outcome = Committed(job=effect.job, generation=generation)
        with self._changed:
            self._apply(outcome)
            self._changed.notify_all()

    def _finish(self, effect: WriteFinished) -> None:
        try:
            self._storage.finish(effect.url, effect.options, effect.job, effect.run, effect.step)
        except (
            Exception
        ) as error:  # no error for the job: its last step is durable, only the note of its end is missing
            log.warning(
                "job %s is finished, but that could not be recorded at %s: %s; started again, it restores step %d and "
                "ends there", effect.job, effect.url, error, effect.step,
            )  # fmt: skip
            return
        with self._changed:
            self._apply(FinishWritten(job=effect.job))

    # ---- watchers ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Delivers pending notices without holding the lock; each broken round is delivered once."""
        due: list[tuple[InProcessWatch, Notice]] = []
        with self._changed:
            for ear in self._ears:
                try:
                    notice = views.query(self.state, self.nodes, ear.request)
                except HooksError:
                    continue
                if isinstance(notice, Notice):
                    ear.request = ear.request.told(notice)
                    due.append((ear, notice))
        for ear, notice in due:
            ear.on_notice(notice)
