"""Jobs of several roles keep their invariants, whatever comes, late or twice; and each restart follows from a rule.

What the budgets must be is counted again here, from the events alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterError
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import Envelope, Lost, Tick, encode
from dlrover_hooks.master.core.roles import role_state
from dlrover_hooks.master.core.roles.role_state import RoleJob
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.protocol import FailurePolicy, JobPhase, RoleBudgets, RoleRules, WorkerCause, WorkerState

INITIAL, RUNNING, DONE = WorkerState.INITIAL, WorkerState.RUNNING, WorkerState.DONE
WINDOW_S, READY_S = 60.0, 20.0
PICK = st.integers(0, 1 << 10)
BACK = st.sampled_from([0, 0, 0, 1, 1, 2, -1])
"""How many lives ago; below 0: a life that there is not yet."""
LIMIT = st.sampled_from([p.UNLIMITED, p.UNLIMITED, 5, 2, 1, 0])
CAUSES = st.sampled_from([
    WorkerCause.KILLED, WorkerCause.RAISED, WorkerCause.NODE_LOST, WorkerCause.SILENT, WorkerCause.PREEMPTED,
])  # fmt: skip
OUTCOMES = {
    FailurePolicy.REPLACE: {"replace"},
    FailurePolicy.REJOIN: {"rejoin", "role"},
    FailurePolicy.ROLE: {"role"},
    FailurePolicy.JOB: {"job"},
}


@st.composite
def rules(draw: st.DrawFn) -> tuple[RoleRules, ...]:
    """Two roles, one of which is a driver at least."""
    drivers = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    policies = st.sampled_from([*FailurePolicy][:4])
    return tuple(
        RoleRules(name, draw(st.integers(1, 3)), draw(policies), driver, draw(LIMIT), draw(LIMIT))
        for name, driver in zip("ab", drivers, strict=True)
    )


def budgets() -> st.SearchStrategy[RoleBudgets]:
    return st.builds(RoleBudgets, LIMIT, LIMIT, LIMIT, st.just(WINDOW_S), st.just(READY_S))


class Recount:
    """The budgets, from the rules and the events of a job."""

    def __init__(self, roles: tuple[RoleRules, ...], limits: RoleBudgets) -> None:
        self._rules = {one.name: one for one in roles}
        self._limits = limits
        self._times = defaultdict[str, list[float]](list)
        self._nodes = dict[tuple[str, int, int], str]()
        """Of each life that has registered."""
        self.lost = set[tuple[str, int, int]]()
        self.avoid = set[str]()

    def used(self, budget: str, now: float) -> int:
        return sum(at > now - WINDOW_S for at in self._times[budget])

    def count(self, events: list[p.RoleEvent]) -> None:
        """All events of the job so far; checks that each failure has the outcome that the rules give it."""
        for at, event in enumerate(events):
            if event.kind == "running":
                self._nodes[event.role, event.rank, event.life] = event.detail.split(",")[0].removeprefix("node ")
            if event.kind != "lost":
                continue
            life = (event.role, event.rank, event.life)
            assert life not in self.lost, f"{life} is counted twice"
            self.lost.add(life)
            following = events[at + 1 : at + 3]
            avoided = following[0].kind == "avoid"
            assert self._node(event, life) == avoided
            self._outcome(event, following[avoided])

    def _charge(self, budget: str, limit: int, at: float) -> bool:
        self._times[budget].append(at)
        return limit != p.UNLIMITED and self.used(budget, at) > limit

    def _node(self, event: p.RoleEvent, life: tuple[str, int, int]) -> bool:
        """Whether its node is avoided from now on."""
        node = self._nodes.get(life, "")
        if not node or event.text in ("preempted", "raised"):
            return False
        over = self._charge(f"node {node}", self._limits.node_failures, event.at) and node not in self.avoid
        self.avoid |= {node} if over else set()
        return over

    def _outcome(self, event: p.RoleEvent, outcome: p.RoleEvent) -> None:
        role = self._rules[event.role]
        if event.text == "preempted":
            over = self._charge("preemption", self._limits.preemptions, event.at)
        else:
            over = self._charge(f"worker {role.name}", role.worker_restarts, event.at)
        whole = role.on_failure is FailurePolicy.ROLE or (
            role.on_failure is FailurePolicy.REJOIN
            and (outcome.kind == "role" or f"'role {role.name}'" in outcome.detail)
        )
        formers = [life for life in self._nodes if life[:2] == (event.role, event.rank) and life[2] < event.life]
        over = over or (event.text == "never_started" and not formers)
        if not over and whole:
            over = self._charge(f"role {role.name}", role.role_restarts, event.at)
        if not over and role.on_failure is FailurePolicy.JOB:
            over = self._charge("job", self._limits.job_restarts, event.at)
        assert outcome.at == event.at
        assert outcome.kind in ({"failed"} if over else OUTCOMES[role.on_failure])


class JobOfRoles(RuleBasedStateMachine):
    """SubMasters, processes, the failure detector and a user, all of which may be late or say a thing twice."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = SqliteJournal(None)
        self.state = job_registry.Master()
        self.now = 1000.0
        self.submissions = 0
        self.given: tuple[tuple[RoleRules, ...], RoleBudgets] = ((), RoleBudgets())
        self.events = list[p.RoleEvent]()
        """All of the current submission."""
        self.ended = set[tuple[str, int, int]]()
        """Lives of the current submission whose end this test has reported first as an early one."""
        self.left = set[str]()
        """Processes that have left by themselves."""
        self.holders = dict[tuple[str, int, int], str]()
        """The process that was accepted for each life."""

    def teardown(self) -> None:
        if self.state.jobs:
            self.restart()
            self.calm()
        self.journal.close()

    @property
    def roles(self) -> RoleJob:
        roles = self.state.jobs["job"].roles
        assert roles is not None
        return roles

    @property
    def shown(self) -> p.Roles:
        return role_state.view(self.roles, self.state.now)

    def pick(self, which: int) -> p.RoleWorker:
        return self.shown.workers[which % len(self.shown.workers)]

    def send(self, event: p.Message) -> p.Message | None:
        """Apply, journal and check; None if it was refused."""
        before = job_registry.encode(self.state)
        old = job_registry.decode(before)
        try:
            outcome = job_registry.apply(self.state, event, self.now)
        except MasterError:
            assert job_registry.encode(self.state) == before, f"a refused {type(event).__name__} changed the state"
            return None
        self.journal.append([encode(Envelope(now=self.now, event=event))])
        if "job" in old.jobs:
            was = old.jobs["job"].roles
            assert was is not None
            if was.submission == self.roles.submission:
                self._compare(was, self.roles, event)
            else:
                assert was.over
                assert self.roles.number > was.number
                self._count_up(was, self.roles, least=1)
        return outcome.reply

    def _compare(self, old: RoleJob, new: RoleJob, event: p.Message) -> None:
        changed = role_state.view(old, self.now) != role_state.view(new, self.now)
        assert new.number > old.number if changed else new.number == old.number
        self._count_up(old, new, least=0)
        if old.over:
            assert (new.phase, new.reason, new.workers, new.failures) == (
                old.phase, old.reason, old.workers, old.failures,
            )  # fmt: skip
            assert new.events == old.events or isinstance(event, p.MasterRestarted)
        more = len(new.events) + new.dropped - len(old.events) - old.dropped
        added = new.events[len(new.events) - more :]
        self.events += added
        for one in added:
            if one.kind in ("role", "job"):
                again = [name for name in new.workers if one.kind == "job" or name == one.role]
                self._count_up(old, new, least=1, roles=again)

    @staticmethod
    def _count_up(old: RoleJob, new: RoleJob, least: int, roles: Iterable[str] = "ab") -> None:
        """The lives of the ranks of `roles` that there were before."""
        for role in roles:
            for worker, before in zip(new.workers[role], old.workers[role], strict=False):
                assert worker.life >= before.life + least

    # ---- rules -------------------------------------------------------------------------------------------------------

    @initialize(roles=rules(), limits=budgets(), runs=st.booleans())
    def begin(self, roles: tuple[RoleRules, ...], limits: RoleBudgets, runs: bool) -> None:
        self._submit(roles, limits)
        if runs:
            self.register_all()

    def _submit(self, roles: tuple[RoleRules, ...], limits: RoleBudgets) -> None:
        self.submissions += 1
        assert self.send(p.StartRoles("job", "user", f"s{self.submissions}", roles, limits)) is not None
        self.given, self.events = (roles, limits), list(self.roles.events)
        self.ended.clear()
        self.holders.clear()

    @rule(roles=rules(), limits=budgets(), same=st.booleans())
    def submit(self, roles: tuple[RoleRules, ...], limits: RoleBudgets, same: bool) -> None:
        """The same one changes nothing; another one is refused while the job runs."""
        before = self.shown
        if same or not self.roles.over:
            name = f"s{self.submissions}" if same else "other"
            reply = self.send(p.StartRoles("job", "user", name, roles, limits))
            assert (reply is not None) == same
            assert role_state.view(self.roles, before_now := self.state.now).workers == before.workers
            assert before_now <= self.now
        else:
            self._submit(roles, limits)

    @rule(which=PICK, back=BACK, other=st.booleans())
    def register(self, which: int, back: int, other: bool) -> None:
        worker = self.pick(which)
        life = max(0, worker.life - back)
        place = (worker.role, worker.rank, life)
        name = f"s{self.submissions} {place}" + (" other" if other and which % 3 == 0 else "")
        event = p.RegisterWorker("job", name, worker.role, worker.rank, life, f"n{which % 2}", life)
        accepted = self.send(event) is not None
        if accepted:
            assert life == worker.life
            assert worker.state is not DONE
            assert not self.roles.over
            assert self.holders.setdefault(place, name) == name, "two processes hold one life"

    @rule()
    def register_all(self) -> None:
        for which in range(len(self.shown.workers)):
            if self.pick(which).state is INITIAL:
                self.register(which, 0, False)

    @rule(which=PICK, back=BACK, cause=CAUSES, recovers=st.booleans(), times=st.sampled_from([1, 1, 2]))
    def end(self, which: int, back: int, cause: WorkerCause, recovers: bool, times: int) -> None:
        """A process ends early, which is reported once or twice."""
        worker = self.pick(which)
        life = max(0, worker.life - back)
        if life == worker.life and worker.state is not DONE and not self.roles.over:
            self.ended.add((worker.role, worker.rank, life))
        mates = [one for one in self.shown.workers if one.role == worker.role and one.rank != worker.rank]
        seen = len(self.events)
        for _ in range(times):
            event = p.WorkerEnded("job", "sub", worker.role, worker.rank, life, cause, "why", recovers)
            assert self.send(event) is not None
        if "rejoin" in [one.kind for one in self.events[seen:]]:
            assert not mates or (recovers and all(one.state is not DONE for one in mates))

    @rule(crashes=st.lists(st.tuples(PICK, CAUSES, st.booleans()), max_size=4))
    def crash(self, crashes: list[tuple[int, WorkerCause, bool]]) -> None:
        """Several processes end, one after the other; what is to be started again is up before the next one ends."""
        for which, cause, recovers in crashes:
            self.register_all()
            self.end(which, 0, cause, recovers, 1)
            self.pass_time(5.0)

    @rule(which=PICK, back=BACK, times=st.sampled_from([1, 1, 2]))
    def done(self, which: int, back: int, times: int) -> None:
        worker = self.pick(which)
        for _ in range(times):
            event = p.WorkerEnded("job", "sub", worker.role, worker.rank, max(0, worker.life - back))
            assert self.send(event) is not None

    @rule(which=PICK, leaves=st.booleans())
    def lose(self, which: int, leaves: bool) -> None:
        """A process that once held a rank is declared dead, or leaves."""
        if not self.holders:
            return
        place, name = sorted(self.holders.items())[which % len(self.holders)]
        if leaves:
            self.send(p.Leave("job", name, p.Departure.STOPPED))
            self.left.add(name)
            return
        if name in self.roles.incarnations:
            self.ended.add(place)
        self.send(Lost("job", name, "silent"))

    @rule(which=PICK, back=BACK, reason=st.sampled_from(["no GPU", "no CPU"]))
    def wait(self, which: int, back: int, reason: str) -> None:
        worker = self.pick(which)
        event = p.WorkerWaits("job", "sub", worker.role, worker.rank, max(0, worker.life - back), reason)
        assert self.send(event) is not None

    @rule(role=st.sampled_from(["a", "b", "c"]))
    def restart_role(self, role: str) -> None:
        lives = {(one.role, one.rank): one.life for one in self.shown.workers}
        accepted = self.send(p.RestartRole("job", "user", role)) is not None
        assert accepted == (role != "c" and not self.roles.over)
        for one in self.shown.workers:
            assert one.life == lives[one.role, one.rank] + (accepted and one.role == role)

    @rule(role=st.sampled_from(["", "a"]))
    def restart_master(self, role: str) -> None:
        assert self.send(p.MasterRestarted("job", "sub", role)) is not None

    @rule(seldom=st.integers(0, 9), failed=st.booleans())
    def stop(self, seldom: int, failed: bool) -> None:
        if seldom == 7:
            assert self.send(p.StopRoles("job", "user", "enough", failed)) is not None
            assert self.roles.over

    @rule(after=st.sampled_from([0.5, 5.0, 15.0, 15.0, 20.0, 60.0]))
    def pass_time(self, after: float) -> None:
        self.now += after
        late = {
            (one.role, one.rank, one.life)
            for of in self.roles.workers.values()
            for one in of
            if one.state is INITIAL and one.due <= self.now and not self.roles.over
        }
        seen = len(self.events)
        self.send(Tick("job"))
        found = {(one.role, one.rank, one.life) for one in self.events[seen:] if one.kind == "lost"}
        assert found <= late
        assert bool(found) == bool(late)
        self.ended |= found

    @rule()
    def restart(self) -> None:
        """The journal gives the same state, and so does a snapshot."""
        written = job_registry.encode(self.state)
        assert job_registry.encode(self.journal.load()) == written
        assert job_registry.decode(written) == self.state
        self.state = self.journal.load()

    @rule(seldom=st.integers(0, 9))
    def end_well(self, seldom: int) -> None:
        if seldom == 7:
            self.calm()

    def calm(self) -> None:
        """No more faults: the job ends, and it is done unless it was given up before."""
        over = self.shown if self.roles.over else None
        self.register_all()
        for which in range(len(self.shown.workers)):
            self.done(which, 0, 1)
        assert self.shown == over if over is not None else self.roles.phase is JobPhase.DONE

    # ---- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def one_process_holds_a_rank(self) -> None:
        if not self.state.jobs:
            return
        holds = {one.incarnation: (one.role, one.rank) for one in self.shown.workers if one.state is RUNNING}
        assert "" not in holds
        if not self.roles.over:
            tracked = {name: place for name, place in holds.items() if name not in self.left}
            assert self.roles.incarnations == tracked, "no sign of life is awaited of a process that has left"
        for one in self.shown.workers:
            if one.state is INITIAL:
                assert (one.incarnation, one.node, one.pid, one.address) == ("", "", 0, "")

    @invariant()
    def budgets_are_what_the_events_say(self) -> None:
        if not self.state.jobs:
            return
        recount = Recount(*self.given)
        recount.count(self.events)
        assert recount.lost == self.ended
        assert set(self.roles.avoid) == recount.avoid
        now = self.state.now - self.roles.began
        for one in self.shown.budgets:
            assert one.used == recount.used(f"{one.kind} {one.of}".strip(), now), one

    @invariant()
    def the_job_is_done_if_and_only_if_all_drivers_are(self) -> None:
        if not self.state.jobs:
            return
        drivers = {one.name for one in self.given[0] if one.driver}
        done = all(one.state is DONE for one in self.shown.workers if one.role in drivers)
        assert (self.roles.phase is JobPhase.DONE) == done
        assert self.state.jobs["job"].finished == self.roles.over

    @invariant()
    def the_deadline_is_to_come(self) -> None:
        if not self.state.jobs:
            return
        due = self.roles.due()
        assert self.state.jobs["job"].alarm <= due
        assert due > self.now
        assert (due == math.inf) == (self.roles.over or all(one.state is not INITIAL for one in self.shown.workers))


TestRoles = JobOfRoles.TestCase
TestRoles.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
