"""A worker's only background thread: sends heartbeats, and the keeper's notices as votes, to the master.

It never raises into training: errors are kept in `error` and surface at the session's next call. While the master is
away votes wait here, in order, and training goes on.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed, Persisted, PersistFailed
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.config import Config, step_for_last_words
from dlrover_hooks.errors import HooksError, JournalFailed, MasterAway, Stale, StorageFailed
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.worker import preimport_list
from dlrover_hooks.worker.preemption import Preemption
from dlrover_hooks.worker.process_activity import ProcessActivity
from dlrover_hooks.worker.resource_usage import Sampler
from dlrover_hooks.worker.stall_watch import StallWatch
from dlrover_hooks.worker.step_clock import StepClock
from dlrover_hooks.worker.thread_stack import stack_of

if TYPE_CHECKING:
    from dlrover_hooks.client import Caller

log = logging.getLogger("dlrover_hooks")
BEAT_S = 1.0
"""Between two heartbeats, unless the master asks for a longer interval."""
STEADY_S = 3 * BEAT_S
"""An outage of the master ends when it has answered every call for this long. An intermittent network therefore counts
as one outage, and is logged once."""
Keepers = Hashed | Persisted | PersistFailed


class _Saved(NamedTuple):
    generation: p.Generation
    durable: bool


class _Skipped(NamedTuple):
    generation: p.Generation


class _Woken(NamedTuple):
    """Something is to be sent at once."""


class _BeatNow(NamedTuple):
    """The next heartbeat is to be sent at once."""


class Reporter:
    """Owns the thread `dlrover-hooks-reporter`; the session calls `start` and `stop`, all on the training thread.

    Args:
        config: its `step_timeout`, `on_stall` and `on_straggler` apply; None: their defaults.
    """

    def __init__(
        self, caller: Caller, job: str, place_: tuple[str, int, int], engine: Checkpointer | None,
        config: Config | None = None,
    ) -> None:  # fmt: skip
        self.error: HooksError | None = None
        self.generations = engine.begin_session() if engine is not None else GenerationTracker()
        self.generations.votes = True
        self.newest_committed: p.Generation | None = None
        self.broken: dict[p.Generation, StorageFailed] = {}
        """Generations that the storage refused, so that saving again would not help."""
        self.newest_stored: p.Generation | None = None
        """The newest generation whose file, written by this rank, was acknowledged by the master."""
        self.cadence = p.Cadence()
        self.step = 0
        self.step_s = 0.0
        self.stored_bytes_per_s = 0.0
        """Measured with the newest durable copy; 0: there was none yet."""
        self.preemption: Preemption | None = None
        """Its messages are sent along with the heartbeats."""
        self._caller, self._job, self._engine = caller, job, engine
        self._incarnation, self._rank, self._world_size = place_
        self._notices: queue.SimpleQueue[Keepers | _Saved | _Skipped | _Woken | _BeatNow | None] = queue.SimpleQueue()
        self._unsent: deque[p.Vote] = deque()
        self._copy_s: dict[p.Generation, float] = {}
        self._vitals = Sampler(f"rank {self._rank} of job {job}")
        self._config = config or Config()
        self._stalls = StallWatch(self._config.step_timeout_s)
        self._stall: p.Stall | None = None
        self.clock = StepClock()
        self._phases: p.StepPhases | None = None
        self._activity = ProcessActivity()
        self._trains, self._training_thread = True, threading.get_ident()
        self._reached, self._outage = False, Outage()
        self._next_beat, self._next_look, self._asked_s, self._ended = 0.0, 0.0, 0.0, False
        self._thread = BackgroundThread(
            "dlrover-hooks-reporter",
            self._run,
            where=f"rank {self._rank} of job {job}",
            again_s=BEAT_S,  # without this thread the worker would be declared dead without a reason
            failed=self.met,
            wake=lambda: self._notices.put(None),
        )

    def start(self, cadence: p.Cadence, begin: int = 0) -> None:
        """Start the thread, or set the cadence if it runs. `begin`: the step from which training begins."""
        self._stalls, self._stall = StallWatch(self._config.step_timeout_s, begin), None
        self.cadence, this = cadence, weakref.ref(self)
        step_for_last_words(lambda: one.step if (one := this()) is not None and one.step else -1)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send what is left and end the thread; it is abandoned after `timeout_s`."""
        self._thread.stop(timeout_s)
        self._vitals.stop()

    def ends(self) -> None:
        """Training is over: from now on no step is awaited."""
        self._trains = False

    def met(self, error: HooksError) -> None:
        """Keep the error of a background thread until the session's next call; the first one counts. Any thread."""
        self.error = self.error or error

    def notice(self, notice: Keepers) -> None:
        """Called by the keeper connection's reader thread."""
        self._notices.put(notice)

    def saved(self, generation: p.Generation, copy_s: float, *, durable: bool = False) -> None:
        """Called by the training thread after a save; `durable`: persist it whatever the cadence is."""
        self._copy_s[generation] = copy_s
        self._notices.put(_Saved(generation, durable))

    def skipped(self, generation: p.Generation) -> None:
        """Called by the training thread after a save that was not made, so that other ranks need not keep theirs."""
        self._notices.put(_Skipped(generation))

    def wake(self) -> None:
        """The preemption has messages. Usable in a signal handler: `SimpleQueue.put` is reentrant."""
        self._notices.put(_Woken())

    def beat_now(self) -> None:
        """The master has news for this rank. Any thread."""
        self._notices.put(_BeatNow())

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended:
            self._turn()

    def _turn(self) -> None:
        try:
            notice = self._notices.get(timeout=max(0.0, min(BEAT_S, self._next_beat - time.monotonic())))
            self._ended = notice is None
            if notice is not None:
                self._take(notice)
        except queue.Empty:
            pass
        self._deliver()
        if self._ended:
            return
        if time.monotonic() >= self._next_look:  # also while the master asks for heartbeats less often
            self._next_look = time.monotonic() + BEAT_S
            self._look_for_stall()
            if (window := self.clock.window(self.step, time.monotonic())) is not None:
                self._phases = msgspec.structs.replace(window, policy=self._config.straggler_policy)
        if time.monotonic() >= self._next_beat:
            before_s, self._next_beat = self._asked_s, time.monotonic() + max(BEAT_S, self._asked_s)
            self._beat()
            if self._asked_s > max(BEAT_S, before_s):  # all ranks are told at about the same time
                self._next_beat = time.monotonic() + random.uniform(BEAT_S, self._asked_s)
        if self.preemption is not None:
            self.preemption.speak(self._call)

    def _take(self, notice: Keepers | _Saved | _Skipped | _Woken | _BeatNow) -> None:
        if isinstance(notice, _Woken):
            return
        if isinstance(notice, _BeatNow):
            self._next_beat = 0.0
            return
        if isinstance(notice, _Skipped):
            self.generations.skipped(notice.generation)
            self._left_out(notice.generation)
        elif isinstance(notice, _Saved):
            self.generations.saved(notice.generation)
            self._persist_if_due(notice.generation if notice.durable else None)
        elif isinstance(notice, Hashed):
            copy_s = self._copy_s.pop(notice.generation, 0.0)
            self.generations.hashed(notice.generation)
            self._unsent.append(self._vote(notice.generation, p.VoteKind.MEMORY, copy_s=copy_s))
            self._persist_if_due()
        elif isinstance(notice, Persisted):
            if notice.seconds > 0:
                self.stored_bytes_per_s = notice.file.nbytes / notice.seconds
            self._unsent.append(self._vote(notice.generation, p.VoteKind.STORED, file=notice.file))
        else:
            self._failed(notice.generation, notice.reason, gone=notice.gone, hint=notice.hint)

    def _left_out(self, generation: p.Generation) -> None:
        """Queues a SKIPPED vote. It replaces one at the end of the queue, so that they do not pile up in an outage."""
        if self._unsent and self._unsent[-1].kind is p.VoteKind.SKIPPED:
            self._unsent.pop()
        self._unsent.append(self._vote(generation, p.VoteKind.SKIPPED))

    def _failed(self, generation: p.Generation, reason: str, *, gone: bool, hint: str = "") -> None:
        kind = p.VoteKind.FAILED if gone else p.VoteKind.REFUSED
        self._unsent.append(self._vote(generation, kind, reason=reason))
        if not gone:
            self.broken[generation] = StorageFailed(
                f"rank {self._rank} could not make {generation} durable: {reason}",
                hint=f'{hint or "mend the checkpoint URL"}; on_error="warn" trains on, kept safe by memory alone',
            )
            self.met(self.broken[generation])

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
            self.generations.passed,
        )

    def _deliver(self) -> None:
        while self._unsent:
            if not self._stands(self._unsent[0]):
                self._drop_withdrawn()
                continue
            reply = self._call(self._unsent[0], "vote")
            if reply is None:
                self.generations.not_delivered(self._unsent[0].generation, may_have_arrived=self._reached)
                self._drop_withdrawn()
                return
            vote = self._unsent.popleft()
            if isinstance(reply, p.Voted):
                self.newest_stored = vote.generation if vote.kind is p.VoteKind.STORED else self.newest_stored
                self.newest_committed = reply.newest_committed or self.newest_committed
                self._heard(reply, vote.generation if vote.kind is p.VoteKind.MEMORY else None)

    def _stands(self, vote: p.Vote) -> bool:
        """False if the vote's slot was overwritten meanwhile, which may happen while the master is away."""
        return vote.kind is not p.VoteKind.MEMORY or self.generations.sending(vote.generation)

    def _drop_withdrawn(self) -> None:
        """Drops withdrawn votes: later votes report that this rank has passed those steps."""
        drop = self.generations.drop_vote
        votes = [one for one in self._unsent if one.kind is not p.VoteKind.MEMORY or not drop(one.generation)]
        self._unsent = deque(votes)

    def _beat(self) -> None:
        if self.step:  # by then, the imports of the first step have happened
            preimport_list.tell()
        vitals, phases = self._vitals.sample(), self._phases
        beat = p.Heartbeat(self._job, self._incarnation, self.step, vitals, self._stall, phases)
        reply = self._call(beat, "beat")
        if isinstance(reply, p.Beat):
            self._asked_s, self._phases = reply.interval_s, None
            if self.preemption is not None:
                self.preemption.summon(reply.parting)
            self._heard(reply)

    def _look_for_stall(self) -> None:
        """Says once where the training thread is, and once that it goes on."""
        idle_s = self._stalls.idle_s
        now = time.monotonic()
        if not (self._stalls.look(self.step, now, active=self._activity.look(now)) and self._trains):
            if self._stall is not None:
                after = f"makes steps again, after {idle_s:.0f} s without one" if self._trains else "ends its training"
                log.warning("rank %d of job %s %s", self._rank, self._job, after)
            self._stall = None
            return
        stack = stack_of(self._training_thread)
        if stack is None:
            return
        if self._stall is None:
            log.warning(
                "rank %d of job %s has made no step for %.0f s (the longest pause before: %.0f s; step_timeout). It is "
                "at %s%s",
                self._rank, self._job, self._stalls.idle_s, self._stalls.longest_s, stack.where,
                f":\n{stack.text.rstrip()}" if self._config.on_stall != "warn" else "",
            )  # fmt: skip
        policy, busy = self._config.stall_policy, self._stalls.busy
        self._stall = p.Stall(self._stalls.idle_s, stack.where, stack.waits_in, policy, busy)

    def _heard(self, reply: p.Voted | p.Beat, counted: p.Generation | None = None) -> None:
        self.cadence = reply.cadence
        complete = self.generations.replied(reply.newest_complete, reply.may_complete, counted)
        if complete is not None and self._engine is not None:
            self._engine.complete(complete)
        self._persist_if_due()

    def _persist_if_due(self, last: p.Generation | None = None) -> None:
        """Persist due generations, and `last`, once the keeper has hashed them."""
        if self._engine is None:
            return
        orders = self.generations.plan(self.cadence, last)
        for generation in orders.ordered:
            self._engine.persist(generation)
        for generation, reason in orders.failed:
            self._failed(generation, reason, gone=True)
        self._engine.fail_if_keeper_gone()

    def _call(self, request: p.Message, channel: str) -> p.Message | None:
        """The reply; None if the master is away, or cannot write its journal and so has changed nothing.

        After None the request is repeated later; until then this rank saves without information about the others. A
        refused vote is dropped, and its error is kept.
        """
        try:
            reply = self._caller.call(request, channel=channel, timeout_s=5.0, again=False)
        except MasterAway as away:
            self._reached = away.reached
            self._hear(away)
            return None
        except JournalFailed as failed:
            self._reached = False
            self._hear(failed)
            return None
        except Stale as stale:
            self.met(stale)
            return p.Done()
        except HooksError as error:
            self.met(error)
            return p.Done()
        self._hear(None)
        return reply

    def _hear(self, away: MasterAway | JournalFailed | None) -> None:
        began, ended = self._outage.heard(away is None, time.monotonic())
        if began and away is not None:
            log.warning("rank %d of job %s trains on without its master: %s", self._rank, self._job, away.message)
        if ended:
            log.warning("rank %d of job %s is connected to its master again", self._rank, self._job)
        self.generations.away = away is not None


class Outage:
    """Detects when an outage of the master begins and ends."""

    def __init__(self) -> None:
        self._missed_at: float | None = None
        """Time of the last unanswered call in the current outage; None without an outage."""

    def heard(self, answered: bool, now: float) -> tuple[bool, bool]:
        """Records the result of one call. Returns whether it began an outage, and whether it ended one."""
        if not answered:
            began, self._missed_at = self._missed_at is None, now
            return began, False
        if self._missed_at is None or now - self._missed_at < STEADY_S:
            return False, False
        self._missed_at = None
        return False, True
