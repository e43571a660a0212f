"""A process that outlives its rounds: what it keeps from one to the next, and how it joins the next one.

Only while `elastic_run` is active (`current`). Its sessions then speak through the client, the watch and the engine
that are kept here, so that no connection ends with a round: to the master the process has lived all the time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.client.liveness_connection import Watcher
from dlrover_hooks.config import Config, Place, change_environment
from dlrover_hooks.errors import HooksError, JobFinished, MasterAway, MasterError, RoundEnded, Stale, UsageError
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.rng.rank_journal import Draws, Statistics
from dlrover_hooks.worker.join import POLL_S, join_request, seat_environment, take_seat

log = logging.getLogger("dlrover_hooks")
_WORD_S = 5.0
"""The watch tells of a break at once; it may be a slow machine."""


_LOOK_S = 0.2
"""Between two looks at the members of a round that may lack one."""


class Membership:
    """This process's part in a job, over all rounds that it lives through.

    Args:
        config: of the environment. The sessions' own must name the same job and master.
        place: where the process stands when it begins; `place.incarnation` is its seat's.
        on_broken: called on the watch's thread, once for each round that breaks.
        on_quiet: called on the training thread with the step, at each quiet point.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        on_broken: Callable[[], None],
        on_quiet: Callable[[int], None] = lambda _: None,
    ) -> None:
        assert config.master is not None
        self.config, self.place, self.incarnation = config, place, place.incarnation
        self.client = MasterClient(config.master, config.token, incarnation=place.incarnation)
        self.round = place.round
        self.attached = False
        """A session took the seat, in this round or before: the master knows that this process recovers."""
        self._attached_to = -1
        """The round whose seat a session took: what the master was told of this process holds for that one."""
        self.survives = False
        """It has lived through a round already."""
        self.engine: Any = None
        """The checkpoints' engine, which keeps its memory and its line to the keeper."""
        self.session: Any = None
        """The session of the round that is on, once there is one."""
        self.parting: Any = None
        """That of the round before. Its signals stay in place: what comes between two rounds is heard."""
        self.salvage: Callable[[], None] = lambda: None
        """Saves what the adapter has of the last quiet point, and lets go of it. Training thread."""
        self.draws = Draws(self._note)
        """Where the random generators stood, for whoever has this rank next."""
        self.tell: Callable[[int], None] = lambda _: None
        """Tells another node what was just noted within the step, if so many ranks do. The thread that reduces."""
        self.outlived: Callable[[], bool] = lambda: False
        """Is something of the round before still there, though its training function was left?"""
        self.left_at: float | None = None
        """When the training function of this round was left, by `time.monotonic`."""
        self.unsupported = ""
        """Why the round that is on cannot be recovered from in process."""
        self.on_quiet = on_quiet
        self._on_broken = on_broken
        self._told = threading.Condition()
        self._broken, self._waiting = 0, 0
        self._watcher: Watcher | None = None
        self._error: MasterError | None = None
        self._here, self.ended = ForkGuard(), False

    def watch(self) -> None:
        """Hold the liveness connection open, from now on to the end."""
        self._watcher = self.client.watch(self.config.job, self._noticed, self._refused)

    def seated(self, number: int) -> None:
        """The round that is on has this number."""
        with self._told:
            self.round = max(self.round, number)
            self._waiting = 0

    def took_seat(self, number: int) -> Watcher | None:
        """A session has taken the seat of the round of this number; the watch, which it ends with the job."""
        self.attached, self._attached_to = True, number
        self.seated(number)
        return self._watcher

    def same_job(self, config: Config) -> None:
        """Raises UsageError if a session's settings name another job than the environment."""
        if (config.job, config.master) != (self.config.job, self.config.master):
            raise UsageError(
                f"elastic_run joined job {self.config.job!r} at {self.config.master}, but this loop is of job "
                f"{config.job!r} at {config.master}",
                hint="leave out job= and master=: the launcher (or DLROVER_HOOKS_JOB, DLROVER_HOOKS_MASTER) says them",
            )

    def refuse(self, what: str) -> None:
        """With `what` in it, the round that is on is not recovered from in process: the launcher starts all anew.

        The master is told with the seat or, once that is taken, at once, so that it knows before the round breaks.

        Raises:
            RoundEnded: it has broken already; nothing has begun here that it could not be recovered from.
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
            raise RoundEnded(f"round {self.round} of job {self.config.job} lost a member") from stale

    # ---- what is heard of the round ---------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """The master says that the round that is on lost a member. Any thread."""
        return self._broken >= max(self.round, 1)

    @property
    def crowded(self) -> bool:
        """Newcomers wait."""
        return self._waiting > 0

    def hears_break(self, within_s: float) -> bool:
        """Does the master say so, now or soon? Where a member's process has ended with 0, those that wait for it have
        to say so themselves, by joining again. A master that is away is waited for, and then it has `within_s` anew.
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
                view = self.client.call(p.ShowJob(self.config.job), timeout_s=1.0)
            except MasterAway:
                until = max(until, min(time.monotonic() + within_s, given_up))
                continue
            except MasterError:
                return False
            if view.round == self.round and any(one.gone == "exited" for one in view.members):
                return True

    def noting(self, statistics: Callable[[], Statistics] = tuple, nbytes: int = 0) -> None:
        """From here on rank 0 notes `statistics()`, which take `nbytes`, beside its random state. Training thread."""
        self.draws.statistics = statistics
        if self.engine is not None and nbytes:
            self.engine.notes.expect(nbytes)

    def _note(self, place: int, head: bytes, body: bytes) -> None:
        if self.engine is not None:
            self.engine.notes.leave(place, head, body)

    def check(self, *, step_ends: bool) -> None:
        """At a quiet point, and ahead of an optimizer's step.

        Raises:
            RoundEnded: the round is broken or, where a step ends, newcomers wait.
        """
        if self._broken >= max(self.round, 1):  # `broken`, without a call in each step
            raise RoundEnded(f"round {self.round} of job {self.config.job} lost a member")
        if step_ends and self._waiting and not self.unsupported:  # the agents let newcomers in
            raise RoundEnded(f"newcomers wait to join job {self.config.job}")

    def _noticed(self, notice: p.Notice) -> None:
        with self._told:
            news = notice.broken and notice.round >= self.round and not self.broken
            self._broken = max(self._broken, notice.round) if notice.broken else self._broken
            self._waiting = notice.waiting if notice.round >= self.round else self._waiting
            self._told.notify_all()
        if news:
            log.info("job %s: round %d lost a member", self.config.job, notice.round)
            self._on_broken()

    def _refused(self, error: MasterError) -> None:
        log.warning("job %s: the master has given this process up: %s", self.config.job, error)
        with self._told:
            self._error = error
            self._told.notify_all()

    # ---- the next round ---------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Save what there is of the last quiet point, once in a life: before a framework tears down, or at its end."""
        self.left_at = self.left_at or time.monotonic()
        salvage, self.salvage = self.salvage, lambda: None
        try:
            salvage()
        except Exception:  # what could not be kept is restored as it was saved before
            log.exception("job %s: nothing was kept of the round that ended", self.config.job)

    def end_life(self) -> None:
        """The round is over for this process: save what there is of it, end what is the session's alone."""
        self.keep()
        if self.session is not None:
            self.parting = self.session.parting
            self.parting.signals.take()  # a framework may have put back what was there before them
            self.session.part()

    def join(self, patience_s: float) -> p.Seated:
        """Join the next round, wait for it, and take its place in the environment. Training thread.

        Raises:
            JobFinished: the others have trained it to its end.
            MasterAway: no round formed in time, or the master has gone.
            MasterError: this process was declared dead meanwhile (Stale).
            Preempted: it was told to go, and half of its time is over.
        """
        join = join_request(self.config, self.place, self.incarnation)
        poll_s = min(POLL_S, self.config.grace_s / 4)  # so that a signal is obeyed in time
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
            if self.client.call(p.ShowJob(self.config.job), timeout_s=10.0).finished:
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
            with contextlib.suppress(HooksError):  # it hears of the end from the watch, too
                said = p.Leave(self.config.job, self.incarnation, p.Departure.PREEMPTED, gone.step)
                self.client.call(said, timeout_s=1.0)
            raise gone

    def close(self) -> None:
        """End the watch, the connections and the engine. Idempotent; nothing in a forked child."""
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


_active: list[Membership] = []


def current() -> Membership | None:
    """That of the `elastic_run` that is active in this process."""
    active = _active[-1] if _active else None
    return active if active is not None and active._here and not active.ended else None


def binds(ranks: int) -> None:
    """What this process gives to the others now, they may build on, whatever becomes of it, and of its node.

    Any thread, on all of so many ranks at once.

    Raises:
        RuntimeError: a peer is gone, as from any collective.
    """
    if (membership := current()) is not None:
        membership.draws.ahead()
        membership.tell(ranks)


def entered(session: Any, config: Config) -> Membership | None:
    """What outlives `session`, which begins, if this process is to survive its round. Raises as `same_job`."""
    membership = current()
    if membership is not None:
        membership.same_job(config)
        membership.session = session
    return membership


def activate(membership: Membership) -> Callable[[], None]:
    """Make it `current`, until what is returned is called."""
    _active.append(membership)
    return lambda: _active.remove(membership) if membership in _active else None
