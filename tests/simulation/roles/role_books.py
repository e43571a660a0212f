"""A second implementation of the master's state of a role job. It applies the same events by the rules of
docs/concepts/roles.md, and `differs` compares both states.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core.events import Lost, Tick
from dlrover_hooks.master.core.roles import role_state
from dlrover_hooks.master.core.roles.role_state import RoleJob
from dlrover_hooks.protocol import FailurePolicy, JobPhase, RoleRules, WorkerCause, WorkerState

Rank = tuple[str, int]
"""Role and rank."""
Life = tuple[str, int, int]
"""Role, rank and life."""
INITIAL, RUNNING, DONE = WorkerState.INITIAL, WorkerState.RUNNING, WorkerState.DONE
_OF_A_NODE = (WorkerCause.KILLED, WorkerCause.SILENT, WorkerCause.NODE_LOST, WorkerCause.NEVER_STARTED)


class RoleSeat:
    """One rank. `holder`: incarnation of its process. `met`: a process has registered for it in this submission."""

    def __init__(self, life: int, due: float) -> None:
        self.life, self.due = life, due
        self.state = INITIAL
        self.holder = self.node = ""
        self.met = False


class CountedEnd(NamedTuple):
    """A life that an event has ended. `cause` None: the worker is done."""

    life: Life
    cause: WorkerCause | None


class RoleBooks:
    """The expected state of the job. `event` updates it. `seats`: the ranks of the current or last submission."""

    def __init__(self, check: Callable[[object, str], None]) -> None:
        self._check = check
        self.phase: JobPhase | None = None
        self.submission = ""
        self.blamed = ""
        """The role whose failure ended the job."""
        self.seats = dict[Rank, RoleSeat]()
        self.counted = dict[Life, WorkerCause]()
        """Lives of all submissions that ended before they were done."""
        self.replaced = set[Life]()
        """Lives that were replaced because of another worker, or by a user."""
        self.heard = dict[str, Rank]()
        """By incarnation: processes whose heartbeats are expected."""
        self.avoid = set[str]()
        self.outcomes: list[CountedEnd] = []
        """Lives that the newest event has ended."""
        self._times = defaultdict[str, list[float]](list)
        self._rules = dict[str, RoleRules]()
        self._budgets = p.RoleBudgets()
        self._floor = dict[str, int]()

    @property
    def runs(self) -> bool:
        """Whether the job runs."""
        return self.phase is JobPhase.RUNNING

    def event(self, event: Any, now: float) -> None:
        """Apply an event that the master has applied at `now`."""
        self.outcomes = []
        if isinstance(event, p.StartRoles):
            self._start(event, now)
        elif self.runs:
            self._of_a_running_job(event, now)

    def _of_a_running_job(self, event: Any, now: float) -> None:
        if isinstance(event, p.RegisterWorker):
            self._register(event)
        elif isinstance(event, p.WorkerEnded):
            self._ended(event, now)
        elif isinstance(event, Lost) and event.incarnation in self.heard:
            self._fail(self.heard[event.incarnation], WorkerCause.SILENT, now, recovers=True)
        elif isinstance(event, p.Leave):
            self.heard.pop(event.incarnation, None)
        elif isinstance(event, Tick):
            for rank, seat in self.seats.items():
                if self.runs and seat.state is INITIAL and seat.due <= now:
                    self._fail(rank, WorkerCause.NEVER_STARTED, now, recovers=True)
        elif isinstance(event, p.RestartRole):
            self._again([rank for rank in self.seats if rank[0] == event.role], now)
        elif isinstance(event, p.StopRoles):
            self._over(JobPhase.FAILED if event.failed else JobPhase.STOPPED)

    # ---- one event ---------------------------------------------------------------------------------------------------

    def _start(self, event: p.StartRoles, now: float) -> None:
        if event.submission == self.submission:
            return
        for (role, _), seat in self.seats.items():
            self._floor[role] = max(seat.life, self._floor.get(role, 0))
        self.submission, self.phase, self.blamed = event.submission, JobPhase.RUNNING, ""
        self._rules, self._budgets = {one.name: one for one in event.roles}, event.budgets
        self._times.clear()
        self.avoid.clear()
        self.heard.clear()
        self.seats = {
            (one.name, rank): RoleSeat(self._floor.get(one.name, 0) + 1, now + event.budgets.ready_s)
            for one in event.roles
            for rank in range(one.workers)
        }

    def _register(self, event: p.RegisterWorker) -> None:
        seat = self.seats[event.role, event.rank]
        self._check(seat.life == event.life, f"{event.incarnation} has life {event.life}, but {seat.life} is current")
        self._check(seat.state is not DONE, f"{event.incarnation} is accepted for a rank that is done")
        self._check(
            seat.holder in ("", event.incarnation),
            f"{event.role} {event.rank} (life {event.life}) is held by {seat.holder} and by {event.incarnation}",
        )
        if seat.state is INITIAL:
            seat.state, seat.holder, seat.node, seat.met = RUNNING, event.incarnation, event.node, True
            self.heard[event.incarnation] = (event.role, event.rank)

    def _ended(self, event: p.WorkerEnded, now: float) -> None:
        rank = (event.role, event.rank)
        seat = self.seats[rank]
        if seat.life != event.life or seat.state is DONE:
            return
        if event.cause is not None:
            self._fail(rank, event.cause, now, recovers=event.recovers)
            return
        self.heard.pop(seat.holder, None)
        seat.state = DONE
        self.outcomes.append(CountedEnd((*rank, seat.life), None))
        if all(seat.state is DONE for (role, _), seat in self.seats.items() if self._rules[role].driver):
            self._over(JobPhase.DONE)

    # ---- failures ----------------------------------------------------------------------------------------------------

    def used(self, budget: str, now: float) -> int:
        """Failures within the window."""
        return sum(at > now - self._budgets.window_s for at in self._times[budget])

    def _charge(self, budget: str, limit: int, now: float) -> bool:
        """Count a failure. Returns whether the budget is used up."""
        self._times[budget].append(now)
        return limit != p.UNLIMITED and self.used(budget, now) > limit

    def _fail(self, rank: Rank, cause: WorkerCause, now: float, *, recovers: bool) -> None:
        seat, rules = self.seats[rank], self._rules[rank[0]]
        life = (*rank, seat.life)
        self._check(life not in self.counted, f"the end of {life} is counted twice")
        self.counted[life] = cause
        self.outcomes.append(CountedEnd(life, cause))
        if seat.node and cause in _OF_A_NODE and self._charge(f"node {seat.node}", self._budgets.node_failures, now):
            self.avoid.add(seat.node)
        if cause is WorkerCause.PREEMPTED:
            over = self._charge("preemption", self._budgets.preemptions, now)
        else:
            over = self._charge(f"worker {rank[0]}", rules.worker_restarts, now)
        over |= cause is WorkerCause.NEVER_STARTED and not seat.met
        over |= rules.on_failure is FailurePolicy.FAIL
        policy = self._policy(rank, recovers=recovers)
        if not over and policy is FailurePolicy.ROLE:
            over = self._charge(f"role {rank[0]}", rules.role_restarts, now)
        if not over and policy is FailurePolicy.JOB:
            over = self._charge("job", self._budgets.job_restarts, now)
        if over:
            self.blamed = rank[0]
            self._over(JobPhase.FAILED)
        elif policy is FailurePolicy.JOB:
            self._again(list(self.seats), now)
        elif policy is FailurePolicy.ROLE:
            self._again([one for one in self.seats if one[0] == rank[0]], now)
        else:
            self._again([rank], now)

    def _policy(self, rank: Rank, *, recovers: bool) -> FailurePolicy:
        policy = self._rules[rank[0]].on_failure
        others = [seat for one, seat in self.seats.items() if one[0] == rank[0] and one != rank]
        if policy is not FailurePolicy.REJOIN or not others:
            return policy
        return policy if recovers and all(seat.state is not DONE for seat in others) else FailurePolicy.ROLE

    def _again(self, ranks: list[Rank], now: float) -> None:
        for rank in ranks:
            seat = self.seats[rank]
            life = (*rank, seat.life)
            if life not in self.counted:
                self.replaced.add(life)
            self.heard.pop(seat.holder, None)
            seat.life, seat.state, seat.holder, seat.node = seat.life + 1, INITIAL, "", ""
            seat.due = now + self._budgets.ready_s

    def _over(self, phase: JobPhase) -> None:
        self.phase = phase
        self.heard.clear()

    # ---- the comparison ----------------------------------------------------------------------------------------------

    def differs(self, roles: RoleJob, now: float) -> str:
        """The first difference to the master's state `roles`; empty: there is none."""
        shown = {(one.role, one.rank): one for one in role_state.view(roles, now).workers}
        if shown.keys() != self.seats.keys():
            return f"the master has the workers {sorted(shown)}"
        for rank, seat in self.seats.items():
            one = shown[rank]
            if (one.life, one.state, one.incarnation) != (seat.life, seat.state, seat.holder):
                return f"{rank} is {one.life} {one.state} {one.incarnation!r} for the master, and not {vars(seat)}"
        for one in role_state.view(roles, now).budgets:
            budget = f"{one.kind} {one.of}".strip()
            if one.used != self.used(budget, now):
                return f"{one.used} of budget {budget!r} are used for the master, and not {self.used(budget, now)}"
        for what, kept, wanted in (
            ("phase", roles.phase, self.phase),
            ("nodes to avoid", set(roles.avoid), self.avoid),
            ("processes to hear of", roles.incarnations, self.heard),
        ):
            if kept != wanted:
                return f"{what} of the master: {kept}, and not {wanted}"
        if self.blamed and repr(self.blamed) not in roles.reason:
            return f"the job failed because of role {self.blamed!r}, and the reason is {roles.reason!r}"
        due = min((seat.due for seat in self.seats.values() if seat.state is INITIAL), default=math.inf)
        if roles.due() != (due if self.runs else math.inf):
            return f"the next start is due at {roles.due()}, and not {due}"
        return ""
