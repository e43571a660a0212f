"""The state of a job of several roles in the master, and its elementary changes."""

from __future__ import annotations

import math

import msgspec

from dlrover_hooks.protocol import (
    UNLIMITED,
    JobPhase,
    RestartCount,
    RoleBudgets,
    RoleEvent,
    RolePlugin,
    RoleRules,
    Roles,
    RoleWorker,
    WorkerState,
)

MOST_EVENTS = 500
"""How many events are kept. Budgets are counted separately, so dropping an event changes none."""
MOST_FORMER = 100


class WorkerRecord(msgspec.Struct):
    """One rank of a role. `due`: its process must have registered by this time, on the clock of `now`."""

    role: str
    rank: int
    life: int = 1
    state: WorkerState = WorkerState.INITIAL
    incarnation: str = ""
    node: str = ""
    pid: int = 0
    address: str = ""
    reason: str = ""
    waits: str = ""
    former: str = ""
    """The incarnation of the last registered process before this life."""
    due: float = math.inf


class FailureTimes(msgspec.Struct):
    """The times of the failures that one budget counts, on the clock of `now`."""

    at: list[float] = []

    def add(self, now: float, window_s: float) -> int:
        """Count a failure; returns how many there are within the window."""
        self.at = [*(one for one in self.at if one > now - window_s), now]
        return len(self.at)

    def used(self, now: float, window_s: float) -> int:
        """How many failures there are within the window."""
        return sum(one > now - window_s for one in self.at)


class RoleJob(msgspec.Struct):
    """A job of several roles. `number` increases with every change, so that `AwaitRoles` can wait for the next."""

    submission: str
    rules: dict[str, RoleRules]
    budgets: RoleBudgets
    spec: str
    began: float
    number: int = 1
    phase: JobPhase = JobPhase.RUNNING
    reason: str = ""
    workers: dict[str, list[WorkerRecord]] = {}
    """By role, in the order of their ranks."""
    incarnations: dict[str, tuple[str, int]] = {}
    """By incarnation: role and rank of each registered process whose heartbeats are expected."""
    failures: dict[str, FailureTimes] = {}
    """By budget: `worker ROLE`, `role ROLE`, `job`, `preemption`, `node NODE`."""
    floor: dict[str, int] = {}
    """By role: the greatest life of a worker in an earlier submission."""
    former: list[str] = []
    """Earlier submissions of this name, at most `MOST_FORMER`, the newest last."""
    avoid: list[str] = []
    """Nodes with too many failures."""
    events: list[RoleEvent] = []
    dropped: int = 0
    plugins: list[RolePlugin] = []

    @property
    def over(self) -> bool:
        """Whether the job is done, failed or stopped."""
        return self.phase is not JobPhase.RUNNING

    def due(self) -> float:
        """The earliest deadline for a process to register; infinity: there is none."""
        if self.over:
            return math.inf
        initial = (one.due for of in self.workers.values() for one in of if one.state is WorkerState.INITIAL)
        return min(initial, default=math.inf)


def started(submission: str, rules: tuple[RoleRules, ...], budgets: RoleBudgets, spec: str, now: float) -> RoleJob:
    """A new job, in which no worker has registered."""
    roles = RoleJob(submission, {one.name: one for one in rules}, budgets, spec, now)
    for one in rules:
        due = now + budgets.ready_s
        roles.workers[one.name] = [WorkerRecord(one.name, rank, due=due) for rank in range(one.workers)]
    note(roles, now, "started", text=", ".join(f"{one.workers} {one.name}" for one in rules))
    return roles


def follow_up(roles: RoleJob, former: RoleJob) -> None:
    """`roles` is a new submission of the job `former`: continue its numbers of lives and changes.

    So the processes that are left of the former submission are refused, and requests that wait for its changes are
    answered.
    """
    roles.number += former.number
    roles.former = [*former.former, former.submission][-MOST_FORMER:]
    roles.floor = dict(former.floor)
    for role, workers in former.workers.items():
        roles.floor[role] = max(one.life for one in workers)
    for role, workers in roles.workers.items():
        for worker in workers:
            worker.life = roles.floor.get(role, 0) + 1


def note(
    roles: RoleJob,
    now: float,
    kind: str,
    worker: WorkerRecord | None = None,
    *,
    role: str = "",
    text: str = "",
    detail: str = "",
) -> None:
    """Append an event. Beyond `MOST_EVENTS` the oldest one is dropped."""
    roles.number += 1
    at = round(max(0.0, now - roles.began), 3)
    if worker is not None:
        roles.events.append(RoleEvent(at, kind, worker.role, worker.rank, worker.life, text, detail))
    else:
        roles.events.append(RoleEvent(at, kind, role, text=text, detail=detail))
    if len(roles.events) > MOST_EVENTS:
        del roles.events[0]
        roles.dropped += 1


def find(roles: RoleJob, role: str, rank: int) -> WorkerRecord | None:
    """The worker with this rank; None: there is none."""
    of = roles.workers.get(role, [])
    return of[rank] if 0 <= rank < len(of) else None


def begin_life(roles: RoleJob, worker: WorkerRecord, now: float, reason: str) -> None:
    """Increase the life of a rank: a new process is to be started, and requests of the old one are refused."""
    roles.incarnations.pop(worker.incarnation, None)
    worker.life += 1
    worker.state, worker.reason, worker.due = WorkerState.INITIAL, reason, now + roles.budgets.ready_s
    worker.waits = ""
    worker.former = worker.incarnation or worker.former
    worker.incarnation, worker.address, worker.node, worker.pid = "", "", "", 0


def end(roles: RoleJob, now: float, phase: JobPhase, reason: str) -> None:
    """End the job: SubMasters and workers learn it and end."""
    roles.phase, roles.reason = phase, reason
    roles.incarnations.clear()
    note(roles, now, phase.value, detail=reason)


def all_drivers_done(roles: RoleJob) -> bool:
    """Whether every worker of every driver role is done."""
    drivers = (name for name, rules in roles.rules.items() if rules.driver)
    return all(one.state is WorkerState.DONE for name in drivers for one in roles.workers[name])


def used(roles: RoleJob, budget: str, now: float) -> int:
    """How many failures this budget counts within the window."""
    found = roles.failures.get(budget)
    return found.used(now, roles.budgets.window_s) if found is not None else 0


def node_budget(node: str) -> str:
    """The name of the budget of a node."""
    return f"node {node}"


def charge(roles: RoleJob, budget: str, limit: int, now: float) -> str:
    """Count a failure. Returns why the budget is used up; empty: it is not."""
    count = roles.failures.setdefault(budget, FailureTimes()).add(now, roles.budgets.window_s)
    if limit == UNLIMITED or count <= limit:
        return ""
    return f"the budget of {limit} for {budget!r} within {roles.budgets.window_s:g} s is used up"


def view(roles: RoleJob, now: float, role: str = "") -> Roles:
    """The state of the job as a message. `role`: only its workers, without spec, budgets and events."""
    names = [role] if role else list(roles.workers)
    return Roles(
        number=roles.number,
        phase=roles.phase,
        reason=roles.reason,
        submission=roles.submission,
        spec="" if role else roles.spec,
        workers=tuple(shown(one) for name in names for one in roles.workers.get(name, [])),
        budgets=() if role else tuple(restart_counts(roles, now)),
        avoid=tuple(roles.avoid),
        events=() if role else tuple(roles.events),
        dropped=roles.dropped,
        plugins=tuple(roles.plugins),
    )


def shown(one: WorkerRecord) -> RoleWorker:
    """The worker as a message."""
    return RoleWorker(
        one.role,
        one.rank,
        one.life,
        one.state,
        one.incarnation,
        one.node,
        one.pid,
        one.address,
        one.reason,
        one.waits,
        one.former,
    )


def restart_counts(roles: RoleJob, now: float) -> list[RestartCount]:
    """What each budget counts within its window, and its limit."""
    found = list[RestartCount]()
    for name, rules in roles.rules.items():
        found.append(RestartCount("worker", name, used(roles, f"worker {name}", now), rules.worker_restarts))
        found.append(RestartCount("role", name, used(roles, f"role {name}", now), rules.role_restarts))
    found.append(RestartCount("job", "", used(roles, "job", now), roles.budgets.job_restarts))
    found.append(RestartCount("preemption", "", used(roles, "preemption", now), roles.budgets.preemptions))
    for budget in sorted(roles.failures):
        if budget.startswith("node "):
            node = budget.removeprefix("node ")
            found.append(RestartCount("node", node, used(roles, budget, now), roles.budgets.node_failures))
    return found
