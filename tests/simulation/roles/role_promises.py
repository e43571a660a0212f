"""What must hold after every event of a role job: the master's state is as expected and matches the processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import events
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.protocol import WorkerCause, WorkerState
from tests.simulation.counted import Counted
from tests.simulation.promises import Promises
from tests.simulation.roles.role_books import CountedEnd, RoleBooks
from tests.simulation.roles.role_draw import JOB

if TYPE_CHECKING:
    from tests.simulation.roles.role_worker import RoleProcess
    from tests.simulation.roles.roles_world import RolesWorld

_ANSWER_S = 5.0
"""A heartbeat may be answered from a state that is this many seconds old, because an event is first journaled."""
_OF_THE_FUNCTION = (None, WorkerCause.RAISED, WorkerCause.PREEMPTED)
"""Causes that a worker itself writes as its outcome."""


class RolePromises(Promises):
    """Checks role jobs. `books`: the expected state. An event of a SubMaster or user may be applied twice, because they
    are not members of the job.
    """

    world: RolesWorld

    def __init__(self, *given: Any) -> None:
        self.books = RoleBooks(self.check)
        self._told = 0
        self._parted: dict[str, float] = {}
        """By incarnation: when the process lost its rank."""
        super().__init__(*given)

    def applied(self, state: Master, event: Any, key: Any, entry: Any, *, now: float) -> None:
        """See `Promises`."""
        name = f"{key.incarnation}/{key.channel}/{key.seq}" if key is not None else ""
        first = self._index.get(name)
        if isinstance(event, p.StartRoles) and event.submission != self.books.submission:
            self.counted, self._told = Counted(self), 0  # a job that was over runs again
        super().applied(state, event, key, entry, now=now)
        if first is not None:
            self._index[name] = first
        if entry is None:
            return
        if isinstance(event, p.RestartRole):
            self.check(first is None, f"{name}: a role is started again twice for one request")
        held = {seat.holder for seat in self.books.seats.values()}
        self.books.event(event, events.decode(entry.record).now)
        left = held - {seat.holder for seat in self.books.seats.values()}
        self._parted |= {name: self._loop.now for name in left}
        roles = state.jobs[JOB].roles
        assert roles is not None
        for line in roles.events[max(0, self._told - roles.dropped) :]:
            self.tell("master", f"{line.kind} {line.role} {line.rank} (life {line.life}) {line.text} {line.detail}")
        self._told = len(roles.events) + roles.dropped
        self._compare(state, events.decode(entry.record).now)
        for outcome in self.books.outcomes:
            self._judge(outcome, event)

    def _compare(self, state: Master, now: float) -> None:
        roles = state.jobs[JOB].roles
        assert roles is not None
        wrong = self.books.differs(roles, now)
        self.check(not wrong, wrong)

    def _forget(self, state: Master, keep: int) -> None:
        super()._forget(state, keep)
        self.books = RoleBooks(self.check)
        for told in self._applied:
            self.books.event(told.event, events.decode(told.record).now)
        job = state.jobs.get(JOB)
        self._told = len(job.roles.events) + job.roles.dropped if job is not None and job.roles is not None else 0
        if self._applied:
            self._compare(state, events.decode(self._applied[-1].record).now)

    def told(self, request: Any, reply: Any) -> None:
        """The master has answered a request: it must accept heartbeats only of processes that hold a rank."""
        del reply
        if isinstance(request, p.Heartbeat):
            parted = self._parted.get(request.incarnation, self.now)
            held = {seat.holder for seat in self.books.seats.values()}
            good = request.incarnation in held or self.now <= parted + _ANSWER_S
            self.check(good, f"{request.incarnation} holds no rank since {parted:.3f} s, and its heartbeat is accepted")

    # ---- comparison with the processes -------------------------------------------------------------------------------

    def _judge(self, outcome: CountedEnd, event: Any) -> None:
        """Check that the process really ended in the way that the master has counted."""
        known, (role, rank, life) = self.world.cluster.lives.get(outcome.life, []), outcome.life
        what = f"worker {rank} of {role} (life {life}) is counted as {outcome.cause.value if outcome.cause else 'done'}"
        if isinstance(event, Lost):
            quiet = self.world.drawn.quiet and self.world.master_up_s() > 2 * self.world.drawn.swarm.lease_s
            self.check(not quiet or not any(map(self._speaks, known)), f"{what}, and it could speak all the time")
        if not isinstance(event, p.WorkerEnded):
            return
        self.check(known, f"{what}, and it was never started")
        if outcome.cause in _OF_THE_FUNCTION:
            same = [one for one in known if one.outcome is not None and one.outcome.cause is outcome.cause]
            self.check(same, f"{what}, and that was not its outcome")
            return
        ended = [one for one in known if (one.process.dead or one.given_up) and not one.ordered]
        self.check(ended, f"{what}, and {[one.process.name for one in known]} run, or were killed by a SubMaster")
        lost = outcome.cause is not WorkerCause.NODE_LOST or any(one.given_up for one in known)
        self.check(lost, f"{what}, and its node was not lost")

    def _speaks(self, one: RoleProcess) -> bool:
        """Whether the process could send heartbeats during the last two leases."""
        still = self._loop.now - one.frozen_at > 2 * self.world.drawn.swarm.lease_s or one.frozen_at < 0
        return one.process.runs and still and one.outcome is None and one.node.up

    def unseen(self, for_s: float) -> list[str]:
        """Processes that hold a rank in the expected state, but ended more than `for_s` seconds ago."""
        until = self._loop.now - for_s
        known = (one for of in self.world.cluster.lives.values() for one in of)
        ended = {one.incarnation for one in known if one.process.dead and one.ended_at < until}
        running = [seat.holder for seat in self.books.seats.values() if seat.state is WorkerState.RUNNING]
        return sorted(one for one in running if one in ended)
