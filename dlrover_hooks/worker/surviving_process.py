"""A process that survives its rounds: what it keeps from one to the next, and how it joins the next one.

Only while `elastic_run` is active (`current`). Its sessions then share the client, the watch and the engine that are
kept here, so that no connection ends with a round: for the master it is one continuous process lifetime.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc.keeper_messages import SaveNotice
from dlrover_hooks.client import MasterClient
from dlrover_hooks.client.liveness_connection import Watcher
from dlrover_hooks.config import Config, Place, change_environment
from dlrover_hooks.errors import HooksError, JobFinished, MasterAway, MasterError, RoundEnded, Stale, UsageError
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.rng.rank_journal import ProcessState, RngJournal, StateSource
from dlrover_hooks.worker.preemption_save import PreemptionSave
from dlrover_hooks.worker.round_join import POLL_S, join_request, seat_environment, take_seat

log = logging.getLogger("dlrover_hooks")
_WORD_S = 5.0
"""Timeout for the notice of a broken round: the watch delivers it at once, but the machine may be slow."""


_LOOK_S = 0.2
"""Interval between two checks of the members of a round that may have lost one."""


class RecoverySupport(StateSource, Protocol):
    """What an adapter adds to a round so that this process can outlive it."""

    def replicate(self, ranks: int) -> None:
        """Replicate the newest note within a step, if all of `ranks` ranks do. The thread that reduces gradients."""
        ...

    def salvage(self) -> None:
        """The round is over: save the state of the last step boundary, and release the model. Training thread."""
        ...

    @property
    def holds_memory(self) -> bool:
        """True while the models of the round still exist."""
        ...


class RoundSession(Protocol):
    """The session of one round, see `dlrover_hooks.session.Session`."""

    @property
    def parting(self) -> PreemptionSave: ...
    def part(self) -> None: ...
    def leave(self, reason: p.Departure, step: int = 0) -> None: ...
    def locate(self, generation: p.Generation, rank: int) -> p.Located: ...
    def heard(self, notice: SaveNotice) -> None: ...
    def met(self, error: HooksError) -> None: ...


class Membership:
    """This process's membership in a job, over all rounds that it survives.

    Args:
        config: from the environment. The sessions' own must name the same job and master.
        place: rank, node and launcher at the start; `place.incarnation` identifies this process.
        on_broken: called on the watch's thread, once for each round that breaks, and if the master declares this
            process dead before a session has attached to its round.
        on_boundary: called on the training thread with the step, at each step boundary.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        on_broken: Callable[[], None],
        on_boundary: Callable[[int], None] = lambda _: None,
    ) -> None:
        assert config.master is not None
        self.config, self.place, self.incarnation = config, place, place.incarnation
        self.client = MasterClient(config.master, config.token, incarnation=place.incarnation)
        self.round = place.round
        self.attached = False
        """A session has attached, in this round or before, and so reported whether this process recovers."""
        self._attached_to = -1
        """The round in which a session attached last; what the attach reported is valid for that round only."""
        self.survives = False
        """It has survived a round already."""
        self.engine: Checkpointer | None = None
        """The checkpoint engine, which keeps its memory and its connection to the keeper."""
        self.session: RoundSession | None = None
        """The session of the current round, once there is one."""
        self.parting: PreemptionSave | None = None
        """The one of the last round. Its signal handlers stay installed, for signals between two rounds."""
        self._support: RecoverySupport | None = None
        self._ended: RecoverySupport | None = None
        self.draws = RngJournal(self._note)
        """Notes of the random state, for the process that has this rank next."""
        self.left_at: float | None = None
        """When the training function of this round was left, by `time.monotonic`."""
        self.unsupported = ""
        """Why the current round cannot be recovered in process; empty if it can."""
        self.on_boundary = on_boundary
        self._on_broken = on_broken
        self._told = threading.Condition()
        self._broken, self._waiting = 0, 0
        self._why = "lost a member"
        self._watcher: Watcher | None = None
        self._error: MasterError | None = None
        self._here, self.ended = ForkGuard(), False

    def watch(self) -> None:
        """Hold the liveness connection open from now on."""
        self._watcher = self.client.watch(self.config.job, self._noticed, self._refused, self._watch_failed)

    def seated(self, number: int) -> None:
        """Set the number of the current round."""
        with self._told:
            self.round = max(self.round, number)
            self._waiting = 0

    def took_seat(self, number: int) -> Watcher | None:
        """A session has attached to round `number`. Returns the watch, which the session closes with the job."""
        self.attached, self._attached_to = True, number
        self.seated(number)
        return self._watcher

    def same_job(self, config: Config) -> None:
        """Raises UsageError if a session's settings name another job or master than the environment."""
        if (config.job, config.master) != (self.config.job, self.config.master):
            raise UsageError(
                f"elastic_run joined job {self.config.job!r} at {self.config.master}, but this loop is of job "
                f"{config.job!r} at {config.master}",
                hint="leave out job= and master=: the launcher (or DLROVER_HOOKS_JOB, DLROVER_HOOKS_MASTER) says them",
            )

    def refuse(self, what: str) -> None:
        """Because of `what`, the current round is not recovered in process: the launcher restarts all workers instead.

        The master is informed by the next attach or, if attached already, at once: it needs this before the round
        breaks.

        Raises:
            RoundEnded: the round has broken already, before anything began that could not be recovered.
            MasterAway, MasterError.
        """
        if self._attached_to == self.round and not self.unsupported:
            self._tell_end()
        if not self.unsupported:
            log.warning("job %s: elastic_run cannot recover %s in process: a lost worker restarts all (see the matrix "
                        "in docs/concepts/recovery.md)", self.config.job, what)  # fmt: skip
        self.unsupported = what

    def _tell_end(self) -> None:
        said = p.Attach(self.config.job, self.incarnation, self.place.node, os.getpid(), recovers=False)
        try:
            self.client.call(said, timeout_s=60.0)
        except Stale as stale:
            if not self.hears_break(_WORD_S):
                raise
            raise RoundEnded(f"round {self.round} of job {self.config.job} {self._why}") from stale

    # ---- state of the round -----------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """The master has reported that the current round lost a member. Any thread."""
        return self._broken >= max(self.round, 1)

    @property
    def crowded(self) -> bool:
        """New workers are waiting to join."""
        return self._waiting > 0

    def hears_break(self, within_s: float) -> bool:
        """True if the master reports within `within_s` that the round is broken, or if a member has exited with 0.

        The master does not break a round for an exit with 0: ranks that wait for that member have to join again. If the
        master is unreachable, this waits for it, and then for `within_s` again.
        """
        now = time.monotonic()
        until, given_up = now + within_s, now + self.place.master_away_s
        while True:
            left = until - time.monotonic()
            with self._told:
                if self._told.wait_for(lambda: self.broken or self._error is not None, min(left, _LOOK_S)):
                    return self.broken
            if left <= 0:
                return False
            try:
                view = self.client.call(p.ShowJob(self.config.job, self.place.node), timeout_s=1.0)
            except MasterAway:
                until = max(until, min(time.monotonic() + within_s, given_up))
                continue
            except MasterError:
                return False
            if view.round == self.round and any(one.gone == "exited" for one in view.members):
                return True

    def supported_by(self, support: RecoverySupport, statistics_bytes: int) -> None:
        """The adapter's part in this round; its batch statistics take `statistics_bytes`. Training thread."""
        self._support = support
        self.draws.read(support)
        if self.engine is not None and statistics_bytes:
            self.engine.notes.expect(statistics_bytes)

    def replicate(self, ranks: int) -> None:
        """See `RecoverySupport.replicate`; does nothing if the adapter does not support recovery."""
        if (support := self._support) is not None:
            support.replicate(ranks)

    @property
    def holds_memory(self) -> bool:
        """True while objects of the last round still exist although its training function has returned."""
        return self._ended is not None and self._ended.holds_memory

    def _note(self, place: int, head: bytes, body: bytes) -> None:
        if self.engine is not None:
            self.engine.notes.leave(place, head, body)

    def check(self, *, step_ends: bool) -> None:
        """At a step boundary, and before an optimizer step.

        Raises:
            RoundEnded: the round is broken or, with `step_ends`, new workers wait.
        """
        if self._broken >= max(self.round, 1):  # `broken`, without a call in each step
            raise RoundEnded(f"round {self.round} of job {self.config.job} {self._why}")
        if step_ends and self._waiting and not self.unsupported:  # if unsupported, the agents let newcomers in
            raise RoundEnded(f"newcomers wait to join job {self.config.job}")

    def _noticed(self, notice: p.Notice) -> None:
        with self._told:
            news = notice.broken and notice.round >= self.round and not self.broken
            self._broken = max(self._broken, notice.round) if notice.broken else self._broken
            self._waiting = notice.waiting if notice.round >= self.round else self._waiting
            self._why = broken_by(notice) if news else self._why
            self._told.notify_all()
        if news:
            log.info("job %s: round %d %s", self.config.job, notice.round, self._why)
            self._on_broken()
        if notice.parting and self.session is not None:
            self.session.parting.summoned()

    def _refused(self, error: MasterError) -> None:
        parting = self.session.parting if self.session is not None else self.parting
        if parting is None or not parting.here:  # else it leaves, as all ranks have agreed
            log.warning("job %s: the master declared this process dead: %s", self.config.job, error)
        with self._told:
            self._error = error
            self._told.notify_all()
        if self._attached_to != self.round:  # it may be waiting for peers that never come; a session raises by itself
            self._on_broken()

    def _watch_failed(self, error: HooksError) -> None:
        if self.session is not None:  # else the line in the log is all
            self.session.met(error)

    # ---- the next round ---------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Save the state of the last step boundary, once per round: before a framework's teardown, or at the end."""
        self.left_at = self.left_at or time.monotonic()
        support, self._support = self._support, None
        if support is None:
            return
        self._ended = support
        self.draws.read(ProcessState())
        try:
            support.salvage()
        except Exception:  # the next round restores an earlier save instead
            log.exception("job %s: nothing was kept of the round that ended", self.config.job)

    def end_life(self) -> None:
        """The round is over for this process: save what there is of it, and end the session's own resources."""
        self.keep()
        if self.session is not None:
            self.parting = self.session.parting
            self.parting.signals.take()  # a framework may have restored the handlers from before
            self.session.part()

    def join(self, patience_s: float) -> p.Seated:
        """Join the next round, wait for it, and set its rank in the environment. Training thread.

        Raises:
            JobFinished: the other workers have trained it to its end.
            MasterAway: no round formed in time, or the master has gone.
            MasterError: this process was declared dead meanwhile (Stale).
            Preempted: this process is preempted, and half of its time is over.
        """
        self._ended = None  # it still refers to the session of the round before, and so to its datasets
        join = join_request(self.config, self.place, self.incarnation)
        poll_s = min(POLL_S, self.config.grace_s / 4)  # so that a signal takes effect in time
        try:
            seated = take_seat(
                self.client,
                join,
                after=self.round,
                patience_s=patience_s,
                away_s=self.place.master_away_s,
                look=self._look,
                poll_s=poll_s,
            )
        except Stale as stale:
            if self.client.call(p.ShowJob(self.config.job, self.place.node), timeout_s=10.0).finished:
                raise JobFinished(f"job {self.config.job} was finished by the others meanwhile") from stale
            raise
        assert seated.round is not None
        environment = seat_environment(
            seated,
            incarnation=self.incarnation,
            local_rank=self.place.local_rank,
            local_world_size=self.place.local_world_size or 1,
        )
        change_environment(environment)
        self.unsupported, self.left_at = "", None
        self.seated(seated.round)
        return seated

    def _look(self) -> None:
        gone = self.parting.overdue() if self.parting is not None else None
        if gone is not None:
            with contextlib.suppress(HooksError):  # the master also detects the end by the watch
                said = p.Leave(self.config.job, self.incarnation, p.Departure.PREEMPTED, gone.step)
                self.client.call(said, timeout_s=1.0)
            raise gone

    def close(self) -> None:
        """End the watch, the connections and the engine. Idempotent; does nothing in a forked child."""
        if not self._here:
            return
        self.ended = True
        if self.parting is not None:
            self.parting.signals.give_back()
        if self._watcher is not None:
            self._watcher.close()
        if self.engine is not None:
            self.engine.close()
        self.client.close()


def broken_by(notice: p.Notice) -> str:
    """What happened to the round, for the log."""
    return f"is rebalanced: {notice.rebalance}" if notice.rebalance else "lost a member"


_active: list[Membership] = []


def current() -> Membership | None:
    """The membership of the `elastic_run` that is active in this process; None without one."""
    active = _active[-1] if _active else None
    return active if active is not None and active._here and not active.ended else None


def binds(ranks: int) -> None:
    """Note this process's random state before it contributes to a result that lets the others complete the step.

    The note is replicated, so it survives this process and its node. Any thread, on all `ranks` ranks at once.

    Raises:
        RuntimeError: a peer is gone, as from any collective.
    """
    if (membership := current()) is not None:
        membership.draws.ahead()
        membership.replicate(ranks)


def entered(session: RoundSession, config: Config) -> Membership | None:
    """The membership for the new `session`; None if this process does not survive rounds. Raises as `same_job`."""
    membership = current()
    if membership is not None:
        membership.same_job(config)
        membership.session = session
    return membership


def activate(membership: Membership) -> Callable[[], None]:
    """Make `membership` the `current` one, until the returned function is called."""
    _active.append(membership)
    return lambda: _active.remove(membership) if membership in _active else None
