"""Parameter server jobs keep their invariants, whatever comes; and when nothing more comes they reach their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterError
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import Envelope, Lost, Tick, encode
from dlrover_hooks.master.core.ps_clusters import task_requests
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters, Version, find, live_chief
from dlrover_hooks.master.core.ps_clusters.task_states import TaskRecord
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.protocol import NodeStatus, NodeType

CHIEF, PS, WORKER = NodeType.CHIEF, NodeType.PS, NodeType.WORKER
INITIAL, RUNNING, PRE_DROPPED = NodeStatus.INITIAL, NodeStatus.RUNNING, NodeStatus.PRE_DROPPED
FAILED, RELEASED = NodeStatus.FAILED, NodeStatus.RELEASED
COUNTS = st.none() | st.integers(1, 3)
PICK = st.integers(0, 1 << 10)


def state_of(state: job_registry.Master) -> PSClusters:
    clusters = state.jobs["job"].ps
    assert clusters is not None
    return clusters


def start(task: p.Task, address: str) -> p.RegisterTask:
    """The launcher starts this task."""
    return p.RegisterTask("job", f"p{task.id}", task.type, task.index, "" if task.type is CHIEF else address, task.id)


def servers(clusters: PSClusters) -> set[int]:
    """Ids of the servers of the announced and the acknowledged version."""
    versions = (clusters.announced, clusters.acknowledged)
    return {task for version in versions if version is not None for task in version.ps}


def tasks_of(clusters: PSClusters, ids: Iterable[int]) -> list[TaskRecord]:
    """Those of them that are listed."""
    return [task for one in ids if (task := find(clusters, one)) is not None]


class Clusters(RuleBasedStateMachine):
    """A launcher, tasks, a chief and a person at the command line, all of which may fail or be late."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = SqliteJournal(None)
        self.state = job_registry.Master()
        self.now = 1000.0
        self.used = 0
        self.on: tuple[int, ...] = ()
        """The servers that the chief is connected to, as the chief knows it."""

    def teardown(self) -> None:
        if self.state.jobs:
            self.calm()
        self.journal.close()

    @property
    def clusters(self) -> PSClusters:
        return state_of(self.state)

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
        if isinstance(event, p.Connected) and not event.failed and self.clusters.acknowledged is not None:
            self.on = self.clusters.acknowledged.ps
        if old.jobs:
            self._compare(state_of(old), self.clusters, event)
        return outcome.reply

    def _compare(self, old: PSClusters, new: PSClusters, event: p.Message) -> None:
        assert new.number >= old.number
        assert task_requests.view(new) == task_requests.view(old) or new.number > old.number
        assert new.version in (old.version, old.version + 1)
        acknowledged = old.acknowledged.number if old.acknowledged is not None else 0
        if new.acknowledged is not None and new.acknowledged.number != acknowledged:
            assert new.acknowledged.number > acknowledged
            assert isinstance(event, p.Connected)
        if new.version > old.version:
            self._announced(old, new)
        if not new.finished:
            for task in new.tasks:
                was = find(old, task.id)
                if task.status is RELEASED and task.type is PS and was is not None and was.status is not RELEASED:
                    assert task.id not in (new.acknowledged.ps if new.acknowledged is not None else ())
                    if new.announced is not None and not new.void:  # a refused version is not offered
                        assert task.id not in new.announced.ps

    def _announced(self, old: PSClusters, new: PSClusters) -> None:
        version = new.announced
        assert version is not None
        listed = tasks_of(new, (*version.ps, *version.workers))
        assert len(listed) == len(version.ps) + len(version.workers)
        assert all(task.status is RUNNING for task in listed)
        assert [task.index for task in listed if task.type is PS] == list(range(new.ps))
        assert version.workers
        assert version.addresses.ps == tuple(task.address for task in listed if task.type is PS)
        assert version.addresses.workers == tuple(task.address for task in listed if task.type is WORKER)
        unfenced = [task for task in tasks_of(new, servers(old)) if task.status is FAILED]
        assert not unfenced, "a version was announced although a dead server was not fenced"
        lives = [task.status is not FAILED for task in tasks_of(new, self.on)]
        whole = len(lives) == len(self.on) and all(lives)
        assert whole or version.addresses.crash, "the chief lost a server and is told that all is well"

    @property
    def shown(self) -> p.Tasks:
        return task_requests.show(self.state.jobs["job"])

    def pick(self, which: int, *statuses: NodeStatus) -> p.Task | None:
        found = [one for one in self.shown.tasks if one.status in statuses]
        return found[which % len(found)] if found else None

    # ---- rules -------------------------------------------------------------------------------------------------------

    @initialize(ps=st.integers(1, 3), workers=st.integers(1, 3), runs=st.booleans())
    def begin(self, ps: int, workers: int, runs: bool) -> None:
        assert self.send(p.ScaleTasks("job", "cli", ps, workers, ready_within_s=10.0)) is not None
        if runs:
            self.calm()

    @rule(ps=COUNTS, workers=COUNTS, within_s=st.sampled_from([5.0, 20.0]))
    def scale(self, ps: int | None, workers: int | None, within_s: float) -> None:
        self.send(p.ScaleTasks("job", "cli", ps, workers, within_s))

    @rule(kind=st.sampled_from([CHIEF, PS, WORKER]), index=st.integers(0, 3))
    def migrate(self, kind: NodeType, index: int) -> None:
        self.send(p.MigrateTask("job", "cli", kind, index, ready_within_s=10.0))

    @rule(which=PICK, same=st.booleans())
    def start_one(self, which: int, same: bool) -> None:
        task = self.pick(which, INITIAL)
        if task is not None:
            self.used += 1
            self.send(start(task, f"fixed:{task.index + 1}" if same else f"new:{self.used}"))

    @rule()
    def start_all(self) -> None:
        for _ in range(10):
            self.start_one(0, False)

    @rule(kind=st.sampled_from([CHIEF, PS, WORKER]), index=st.integers(0, 3))
    def start_without_launcher(self, kind: NodeType, index: int) -> None:
        self.used += 1
        self.send(p.RegisterTask("job", f"u{self.used}", kind, index, f"pod:{self.used}"))

    @rule(which=PICK, leaves=st.booleans())
    def lose(self, which: int, leaves: bool) -> None:
        task = self.pick(which, RUNNING, PRE_DROPPED, RELEASED)
        if task is not None:
            self.send(
                p.Leave("job", task.incarnation, p.Departure.STOPPED)
                if leaves
                else Lost("job", task.incarnation, "silent")
            )

    @rule(which=PICK, status=st.sampled_from(NodeStatus), code=st.sampled_from([-9, -9, -9, 1, 0]))
    def fence(self, which: int, status: NodeStatus, code: int) -> None:
        task = self.pick(which, status)
        if task is not None and not (code == 0 and which % 4):
            self.send(p.Fenced("job", "launcher", task.id, code))

    @rule(late=st.integers(0, 2), failed=st.sampled_from(["", "", "refused"]))
    def connect(self, late: int, failed: str) -> None:
        """The chief answers the newest version, or an older one that it has been slow to connect to."""
        chief = live_chief(self.clusters)
        version = self.clusters.version - late
        if chief is None or version < 1:
            return
        self.send(p.Connected("job", chief.incarnation, version, failed))

    @rule(which=PICK, back=st.integers(0, 1), kind=st.sampled_from([PS, WORKER]))
    def report(self, which: int, back: int, kind: NodeType) -> None:
        chief, version = live_chief(self.clusters), self.clusters.version - back
        if chief is not None and version >= 0:
            self.send(p.ReportTask("job", chief.incarnation, version, kind, which % 3, "refused"))

    @rule(after=st.sampled_from([0.5, 5.0, 30.0]))
    def pass_time(self, after: float) -> None:
        self.now += after
        self.send(Tick("job"))

    @rule()
    def go_on(self) -> None:
        """The launcher starts and reaps, the chief connects."""
        for task in self.shown.tasks:
            if task.status in (FAILED, RELEASED):
                assert self.send(p.Fenced("job", "launcher", task.id, -9)) is not None
            elif task.status is INITIAL and not self.clusters.finished:
                self.used += 1
                self.send(start(task, f"new:{self.used}"))  # refused if it was released in the meantime
        chief = live_chief(self.clusters)
        if chief is None or self.clusters.finished:
            return
        given = task_requests.awaited_cluster(self.state.jobs["job"], p.AwaitCluster("job", chief.incarnation))
        if given is not None:
            assert self.send(p.Connected("job", chief.incarnation, given.version)) is not None

    @rule()
    def calm(self) -> None:
        """No more faults: soon the job is what it shall be."""
        for _ in range(8):
            self.go_on()
        clusters, shown = self.clusters, self.shown
        if clusters.finished:
            assert all(task.type is CHIEF for task in shown.tasks)
            return
        assert not clusters.void
        assert not clusters.pending
        assert shown.acknowledged == shown.version > 0
        assert all(task.status is RUNNING for task in shown.tasks)
        assert sorted(task.index for task in shown.tasks if task.type is PS) == list(range(shown.ps))
        assert sorted(task.index for task in shown.tasks if task.type is WORKER) == list(range(shown.workers))
        current = clusters.announced
        assert current is not None
        assert {task.id for task in shown.tasks if task.type is PS} == {*current.ps}
        assert {task.id for task in shown.tasks if task.type is WORKER} == {*current.workers}

    @rule()
    def restart(self) -> None:
        assert job_registry.encode(self.journal.load()) == job_registry.encode(self.state)
        self.state = self.journal.load()

    # ---- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def one_chief(self) -> None:
        if self.state.jobs:
            tasks = self.shown.tasks
            assert sum(task.type is CHIEF and task.status is RUNNING for task in tasks) <= 1

    @invariant()
    def the_chief_is_given_living_servers(self) -> None:
        chief = live_chief(self.clusters) if self.state.jobs else None
        if chief is None:
            return
        given = task_requests.awaited_cluster(self.state.jobs["job"], p.AwaitCluster("job", chief.incarnation))
        if given is not None and not self.clusters.finished:
            announced = self.clusters.announced
            assert isinstance(announced, Version)
            assert all(task.status is RUNNING for task in tasks_of(self.clusters, announced.ps))

    @invariant()
    def the_deadline_is_to_come(self) -> None:
        """A deadline that has passed would be set again and again."""
        if self.state.jobs:
            due = self.clusters.due(self.now)
            assert due == math.inf or due > self.now or self.clusters.finished

    @invariant()
    def processes_are_known_by_incarnation(self) -> None:
        if self.state.jobs:
            for incarnation, task in self.clusters.incarnations.items():
                assert [one.incarnation for one in tasks_of(self.clusters, [task])] == [incarnation]
            known = set(self.clusters.incarnations.values())
            alive = {task.id for task in self.clusters.tasks if task.status in (RUNNING, PRE_DROPPED)}
            assert alive <= known


TestClusters = Clusters.TestCase
TestClusters.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
