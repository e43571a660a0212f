"""The one background thread of a worker: carries the keeper's notices to the master as votes, and the heartbeats.

It never raises into training: what went wrong is kept in `error` and surfaced by the session's next verb. While the
master is away votes wait here, in order, and training goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.cadence import Durable
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.wire import Hashed, Persisted, PersistFailed
from dlrover_hooks.errors import HooksError, MasterAway, Stale, StorageFailed
from dlrover_hooks.runtime.vitals import Sampler

log = logging.getLogger("dlrover_hooks")
Keepers = Hashed | Persisted | PersistFailed


class _Saved(NamedTuple):
    generation: p.Generation
    durable: bool


class _Skipped(NamedTuple):
    """A save found no slot: what the next one may overwrite depends on what is complete by now."""


class Caller(Protocol):
    """A `MasterClient`, or the core in this process (`Alone`)."""

    def call(self, request: p.Message, *, channel: str = "main", timeout_s: float | None = None) -> p.Message: ...


class Courier:
    """Owns the thread `dlrover-hooks-courier`; `start` and `stop` are called by the session."""

    def __init__(self, caller: Caller, job: str, place_: tuple[str, int, int], engine: Checkpointer | None) -> None:
        self.error: HooksError | None = None
        self.newest_complete: p.Generation | None = None
        self.newest_committed: p.Generation | None = None
        self.failed: set[p.Generation] = set()
        """Generations that this rank could not make durable; the last one of a run is saved again (`LastSave`)."""
        self.broken: dict[p.Generation, StorageFailed] = {}
        """Those of them that the storage did not take, which would not help."""
        self.newest_stored: p.Generation | None = None
        """The newest one whose file, written by this rank, the master knows of."""
        self.cadence = p.Cadence()
        self.step = 0
        self.step_s = 0.0
        self._caller, self._job, self._engine = caller, job, engine
        self._incarnation, self._rank, self._world_size = place_
        self._notices: queue.SimpleQueue[Keepers | _Saved | _Skipped | None] = queue.SimpleQueue()
        self._unsent: deque[p.Vote] = deque()
        self._copy_s: dict[p.Generation, float] = {}
        self._durable = Durable()
        self._hashed: deque[p.Generation] = deque(maxlen=16)
        self._to_persist: list[p.Generation] = []
        self._vitals = Sampler()
        self._away = False
        self._thread = threading.Thread(target=self._run, name="dlrover-hooks-courier", daemon=True)

    def start(self, cadence: p.Cadence) -> None:
        self.cadence = cadence
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._notices.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def notice(self, notice: Keepers) -> None:
        """Called by the keeper link's reader thread."""
        self._notices.put(notice)

    def saved(self, generation: p.Generation, copy_s: float, *, durable: bool = False) -> None:
        """Called by the training thread after a save; `durable`: persist it whatever the cadence says."""
        self._copy_s[generation] = copy_s
        self._notices.put(_Saved(generation, durable))

    def skipped(self) -> None:
        """Called by the training thread after a save that was not made: ask the master now, not with the next beat."""
        self._notices.put(_Skipped())

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = 0.0
        while True:
            try:
                notice = self._notices.get(timeout=max(0.0, min(1.0, next_beat - time.monotonic())))
                if notice is None:
                    self._deliver()
                    return
                if isinstance(notice, _Skipped):
                    next_beat = 0.0
                else:
                    self._take(notice)
            except queue.Empty:
                pass
            self._deliver()
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + 1.0

    def _take(self, notice: Keepers | _Saved) -> None:
        if isinstance(notice, _Saved):
            self._durable.saved(notice.generation)
            if notice.durable:
                self._plan_persist(notice.generation, last=True)
            self._persist_if_due()
        elif isinstance(notice, Hashed):
            copy_s = self._copy_s.pop(notice.generation, 0.0)
            self._hashed.append(notice.generation)
            self._unsent.append(self._vote(notice.generation, p.VoteKind.MEMORY, copy_s=copy_s))
            self._persist_if_due()
        elif isinstance(notice, Persisted):
            self._unsent.append(self._vote(notice.generation, p.VoteKind.STORED, file=notice.file))
        else:
            self._failed(notice.generation, notice.reason, gone=notice.gone)

    def _failed(self, generation: p.Generation, reason: str, *, gone: bool) -> None:
        self.failed.add(generation)
        if generation in self._to_persist:
            self._to_persist.remove(generation)
        self._unsent.append(self._vote(generation, p.VoteKind.FAILED, reason=reason))
        if not gone:
            self.broken[generation] = StorageFailed(
                f"rank {self._rank} could not make {generation} durable: {reason}",
                hint="make room or mend the checkpoint URL; memory checkpoints go on; "
                'on_error="warn" trains on regardless',
            )
            self.error = self.error or self.broken[generation]

    def _plan_persist(self, generation: p.Generation, *, last: bool = False) -> None:
        if self._engine is None or generation in self._to_persist:
            return
        if self._engine.hold(generation, last=last):
            self._to_persist.append(generation)
        else:
            self._failed(generation, "an older one is still being written", gone=True)

    def _vote(self, generation: p.Generation, kind: p.VoteKind, *, file: p.ShardFile | None = None, reason: str = "",
              copy_s: float = 0.0) -> p.Vote:  # fmt: skip
        return p.Vote(
            self._job,
            self._incarnation,
            generation,
            self._rank,
            self._world_size,
            kind,
            file,
            reason,
            self.step_s,
            copy_s,
        )

    def _deliver(self) -> None:
        while self._unsent:
            reply = self._call(self._unsent[0], "vote")
            if reply is None:
                return
            vote = self._unsent.popleft()
            if isinstance(reply, p.Voted):
                if vote.kind is p.VoteKind.STORED:
                    self.newest_stored = vote.generation
                self.newest_committed = reply.newest_committed or self.newest_committed
                self._heard(reply.newest_complete, reply.cadence)

    def _beat(self) -> None:
        reply = self._call(p.Heartbeat(self._job, self._incarnation, self.step, self._vitals.sample()), "beat")
        if isinstance(reply, p.Beat):
            self._heard(reply.newest_complete, reply.cadence)

    def _heard(self, newest_complete: p.Generation | None, cadence: p.Cadence) -> None:
        self.cadence = cadence
        if newest_complete is not None and newest_complete != self.newest_complete:
            self.newest_complete = newest_complete
            if self._engine is not None:
                self._engine.complete(newest_complete)
        self._persist_if_due()

    def _persist_if_due(self) -> None:
        """Order what is due once the keeper has hashed it; give it up if a later one was hashed and it never was."""
        if (generation := self._durable.due(self.cadence)) is not None:
            self._plan_persist(generation)
        for generation in list(self._to_persist):
            if self._engine is not None and generation in self._hashed:
                self._to_persist.remove(generation)
                self._engine.persist(generation)
            elif self._engine is not None and self._hashed and self._hashed[-1] > generation:
                self._to_persist.remove(generation)
                self._engine.release(generation)
                self._failed(generation, "its slot was used again before it was hashed", gone=True)

    def _call(self, request: p.Message, channel: str) -> p.Message | None:
        """The reply; None if the master is away (try again later). A refused vote is dropped and remembered."""
        try:
            reply = self._caller.call(request, channel=channel, timeout_s=5.0)
        except MasterAway as away:
            if not self._away:
                log.warning("rank %d of job %s trains on without its master: %s", self._rank, self._job, away.message)
            self._away = True
            return None
        except Stale as stale:
            self.error = self.error or stale
            return p.Done()
        except HooksError as error:
            self.error = self.error or error
            return p.Done()
        if self._away:
            log.warning("rank %d of job %s hears its master again", self._rank, self._job)
        self._away = False
        return reply
