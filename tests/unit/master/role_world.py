"""A job of several roles in the master, with its clock in the test's hands."""

from __future__ import annotations

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.effects import Effect
from dlrover_hooks.master.core.events import Key, Lost, Tick
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.protocol import FailurePolicy, JobPhase, RoleBudgets, RoleRules, WorkerCause, WorkerState

REPLACE, REJOIN, ROLE = FailurePolicy.REPLACE, FailurePolicy.REJOIN, FailurePolicy.ROLE
JOB, FAIL = FailurePolicy.JOB, FailurePolicy.FAIL
INITIAL, RUNNING, DONE = WorkerState.INITIAL, WorkerState.RUNNING, WorkerState.DONE
KILLED, RAISED, SILENT = WorkerCause.KILLED, WorkerCause.RAISED, WorkerCause.SILENT
PREEMPTED, NODE_LOST = WorkerCause.PREEMPTED, WorkerCause.NODE_LOST
PLENTY = RoleBudgets(job_restarts=100, node_failures=100, window_s=1000.0, ready_s=60.0)


def actor(on_failure: FailurePolicy = REPLACE, workers: int = 2, *, worker: int = 100, role: int = 100) -> RoleRules:
    """The driver role of most tests."""
    return RoleRules("actor", workers, on_failure, True, worker, role)


REWARD = RoleRules("reward", 1, REPLACE, driver=False)


class RoleWorld:
    """A job, with `now` in its hands. Each process has the incarnation `ROLE:RANK:LIFE`."""

    def __init__(self, *roles: RoleRules, budgets: RoleBudgets = PLENTY, up: bool = True) -> None:
        self.state, self.now = job_registry.Master(), 1000.0
        self.effects: tuple[Effect, ...] = ()
        self.submit("first", *(roles or (actor(), REWARD)), budgets=budgets)
        if up:
            self.register_all()

    def send(self, event: p.Message, key: Key | None = None) -> p.Message:
        outcome = job_registry.apply(self.state, event, self.now, key)
        self.effects = outcome.effects
        return outcome.reply

    def submit(self, submission: str, *roles: RoleRules, budgets: RoleBudgets = PLENTY, spec: str = "{}") -> p.Roles:
        reply = self.send(p.StartRoles("job", "user", submission, roles, budgets, spec))
        assert isinstance(reply, p.Roles)
        return reply

    def show(self, role: str = "") -> p.Roles:
        reply = views.query(self.state, Nodes(), p.ShowRoles("job", role))
        assert isinstance(reply, p.Roles)
        return reply

    def awaited(self, after: int, role: str = "") -> p.Roles | None:
        reply = views.query(self.state, Nodes(), p.AwaitRoles("job", "sub-master", after, role))
        assert reply is None or isinstance(reply, p.Roles)
        return reply

    def worker(self, rank: int, role: str = "actor") -> p.RoleWorker:
        return next(one for one in self.show(role).workers if one.rank == rank)

    @property
    def lives(self) -> dict[str, list[int]]:
        """By role, the current life of each rank."""
        shown = self.show()
        return {role: [one.life for one in shown.workers if one.role == role] for role in self._roles(shown)}

    @staticmethod
    def _roles(shown: p.Roles) -> list[str]:
        return list(dict.fromkeys(one.role for one in shown.workers))

    def register(self, rank: int, role: str = "actor", *, life: int = 0, node: str = "", name: str = "") -> p.Message:
        life = life or self.worker(rank, role).life
        return self.send(
            p.RegisterWorker(
                "job", name or f"{role}:{rank}:{life}", role, rank, life, node or f"n{rank}", 100 + life, "host:1"
            )
        )

    def register_all(self) -> None:
        """Everything that is to be started is up."""
        for one in self.show().workers:
            if one.state is INITIAL:
                self.register(one.rank, one.role)

    def end(
        self,
        rank: int,
        cause: WorkerCause | None = KILLED,
        role: str = "actor",
        *,
        life: int = 0,
        detail: str = "exit code -9",
        recovers: bool = False,
        policy: FailurePolicy | None = None,
    ) -> None:
        """The SubMaster reports an end of the current life, or of `life`."""
        life = life or self.worker(rank, role).life
        self.send(
            p.WorkerEnded("job", "sub-master", role, rank, life, cause, detail if cause else "", recovers, policy)
        )

    def done(self, rank: int, role: str = "actor") -> None:
        self.end(rank, None, role)

    def lose(self, rank: int, role: str = "actor") -> None:
        """The failure detector declares the process of the current life dead."""
        self.send(Lost("job", self.worker(rank, role).incarnation, "no heartbeat"))

    def wait(self, rank: int, reason: str, role: str = "actor", *, life: int = 0) -> None:
        life = life or self.worker(rank, role).life
        self.send(p.WorkerWaits("job", "sub-master", role, rank, life, reason))

    def restart(self, role: str = "actor") -> None:
        self.send(p.RestartRole("job", "user", role))

    def stop(self, *, failed: bool = False) -> None:
        self.send(p.StopRoles("job", "user", "enough", failed))

    def tick(self, after_s: float) -> None:
        self.now += after_s
        self.send(Tick("job"))

    def used(self, kind: str, of: str = "") -> int:
        found = [one.used for one in self.show().budgets if (one.kind, one.of) == (kind, of)]
        assert len(found) == 1, self.show().budgets
        return found[0]

    @property
    def phase(self) -> JobPhase | None:
        return self.show().phase

    @property
    def kinds(self) -> list[str]:
        """The kinds of all events, in order."""
        return [one.kind for one in self.show().events]

    def events(self, kind: str) -> list[tuple[str, int, int]]:
        """Role, rank and life of the events of a kind."""
        return [(one.role, one.rank, one.life) for one in self.show().events if one.kind == kind]
