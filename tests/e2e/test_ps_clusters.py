"""A parameter server job over HTTP: every request, and a master that is killed in the middle of a switch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Conflict, JobAlive, Stale, UnknownJob
from tests.e2e.master_process import LiveMaster
from tests.waiting import WAIT_S, until

LEASE_S = 3.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[LiveMaster]:
    """One whose leases do not end within a test."""
    yield from _master(tmp_path, 3600.0)


@pytest.fixture
def strict_master(tmp_path: Path) -> Iterator[LiveMaster]:
    yield from _master(tmp_path, LEASE_S)


def _master(folder: Path, lease_s: float) -> Iterator[LiveMaster]:
    with contextlib.ExitStack() as owned:
        live = LiveMaster(folder, "--lease", str(lease_s))
        owned.callback(live.close)
        yield live


class Cluster:
    """The requests of a launcher, of tasks and of a chief. Only `beating` keeps the tasks alive."""

    def __init__(self, master: LiveMaster) -> None:
        self.master, self.launcher = master, master.client("launcher")

    def tasks(self) -> p.Tasks:
        return self.launcher.call(p.ShowTasks("job"))

    def start(self) -> None:
        """Start every task that is to be started."""
        for task in self.tasks().tasks:
            if task.status is p.NodeStatus.INITIAL:
                address = "" if task.type is p.NodeType.CHIEF else f"127.0.0.1:{2000 + task.id}"
                who = f"task{task.id}"
                self.master.client(who).call(p.RegisterTask("job", who, task.type, task.index, address, task.id))

    @contextlib.contextmanager
    def beating(self, but: int) -> Iterator[None]:
        """A thread sends the heartbeats of all tasks but one."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(LEASE_S / 10):
                for task in self.tasks().tasks:
                    if task.id != but and task.status is p.NodeStatus.RUNNING:
                        self.master.client(task.incarnation).call(p.Heartbeat("job", task.incarnation))

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def named(self, kind: p.NodeType, status: p.NodeStatus, index: int = 0) -> p.Task:
        found = self.tasks().tasks
        return next(task for task in found if (task.type, task.status, task.index) == (kind, status, index))

    @property
    def chief(self) -> str:
        return self.named(p.NodeType.CHIEF, p.NodeStatus.RUNNING).incarnation

    def switch(self, after: int) -> p.PSCluster:
        """The chief waits for the next version and connects to it."""
        chief = self.master.client(self.chief)
        version = chief.call(p.AwaitCluster("job", self.chief, after=after))
        assert version.version > after
        chief.call(p.Connected("job", self.chief, version.version))
        return version


def test_every_change_of_a_cluster_goes_through_a_master_that_is_killed(master: LiveMaster) -> None:
    """Scaled up, migrated, scaled down, a server lost: each switch is announced by one master and ended by the next."""
    cluster = Cluster(master)
    cluster.launcher.call(p.ScaleTasks("job", "launcher", ps=1, workers=1))
    cluster.start()
    first = cluster.switch(0)
    assert len(first.ps) == 1
    assert len(first.workers) == 1
    assert not first.crash
    cluster.launcher.call(p.ScaleTasks("job", "launcher", ps=2))
    cluster.start()
    master.kill()
    master.restart()
    second = cluster.switch(1)
    assert second.ps[:1] == first.ps
    assert len(second.ps) == 2
    cluster.launcher.call(p.MigrateTask("job", "launcher", p.NodeType.PS, 0))
    cluster.start()
    master.kill()
    master.restart()
    old = cluster.named(p.NodeType.PS, p.NodeStatus.PRE_DROPPED)
    third = cluster.switch(2)
    assert third.ps[0] != second.ps[0]
    assert third.ps[1] == second.ps[1]
    assert cluster.named(p.NodeType.PS, p.NodeStatus.RELEASED).id == old.id
    cluster.launcher.call(p.Fenced("job", "launcher", old.id))
    dead = cluster.named(p.NodeType.PS, p.NodeStatus.RUNNING, 1)
    cluster.launcher.call(p.Fenced("job", "launcher", dead.id, -9))
    cluster.start()
    fourth = cluster.switch(3)
    assert fourth.crash
    assert fourth.ps[1] != third.ps[1]
    cluster.launcher.call(p.ScaleTasks("job", "launcher", ps=1))
    fifth = cluster.switch(4)
    assert not fifth.crash
    assert fifth.ps == fourth.ps[:1]
    chief = cluster.chief
    master.client(chief).call(p.EndTasks("job", chief))
    shown = cluster.tasks()
    assert shown.finished
    assert shown.acknowledged == shown.version == 5
    with pytest.raises(JobAlive):
        cluster.launcher.call(p.DeleteJob("job"))
    for task in shown.tasks:
        cluster.launcher.call(p.Fenced("job", "launcher", task.id))
    assert cluster.tasks().tasks == ()
    assert cluster.launcher.call(p.ShowJob("job")).finished
    cluster.launcher.call(p.DeleteJob("job"))
    with pytest.raises(UnknownJob):
        cluster.tasks()


@pytest.mark.requirement("DL-75")
def test_every_task_and_the_launcher_hear_of_new_parameter_servers(master: LiveMaster) -> None:
    """Each waits for the list of tasks, with addresses; the chief also for the version of the cluster."""
    cluster = Cluster(master)
    cluster.launcher.call(p.ScaleTasks("job", "launcher", ps=1, workers=2))
    cluster.start()
    cluster.switch(0)
    before = cluster.tasks()
    listeners = ["launcher", *(task.incarnation for task in before.tasks)]
    cluster.launcher.call(p.ScaleTasks("job", "launcher", ps=2))
    cluster.start()
    new = cluster.named(p.NodeType.PS, p.NodeStatus.RUNNING, 1).address
    for name in listeners:
        heard = master.client(name).call(p.AwaitTasks("job", name, cluster.tasks().number - 1))
        assert new in [task.address for task in heard.tasks], name
    assert cluster.switch(1).ps[1] == new


def test_a_stopped_server_is_found_within_its_lease_though_it_waits_for_tasks(strict_master: LiveMaster) -> None:
    """Also by a master that was restarted: it waits a whole lease for every task."""
    master = strict_master
    cluster = Cluster(master)
    cluster.launcher.call(p.ScaleTasks("job", "launcher", ps=1, workers=1))
    cluster.start()
    server = cluster.named(p.NodeType.PS, p.NodeStatus.RUNNING)
    with cluster.beating(but=server.id):
        cluster.switch(0)
        master.kill()
        master.restart()

        def failed() -> bool:
            number = cluster.tasks().number
            master.client(server.incarnation).call(p.AwaitTasks("job", server.incarnation, number, timeout_s=0.1))
            return any(task.status is p.NodeStatus.FAILED for task in cluster.tasks().tasks)

        until(failed, "the loss of the server")
        assert cluster.named(p.NodeType.PS, p.NodeStatus.FAILED).id == server.id
        with pytest.raises(Stale):
            master.client(server.incarnation).call(p.Heartbeat("job", server.incarnation))
        cluster.start()
        chief = master.client(cluster.chief)
        assert chief.call(p.AwaitCluster("job", cluster.chief, after=1, timeout_s=0.1)) == p.PSCluster(version=1)
        cluster.launcher.call(p.Fenced("job", "launcher", server.id, -9))
        assert cluster.switch(1).crash


def test_bad_requests_are_refused_with_a_hint(master: LiveMaster) -> None:
    cluster = Cluster(master)
    call, stranger = cluster.launcher.call, master.client("x").call
    with pytest.raises(UnknownJob):
        cluster.tasks()
    with pytest.raises(BadRequest, match="at least one of each"):
        call(p.ScaleTasks("job", "launcher", ps=1))
    with pytest.raises(BadRequest, match="more than 4096 tasks"):
        call(p.ScaleTasks("job", "launcher", ps=1, workers=5000))
    call(p.ScaleTasks("job", "launcher", ps=1, workers=1))
    with pytest.raises(BadRequest, match="HOST:PORT"):
        stranger(p.RegisterTask("job", "x", p.NodeType.PS, 0, "nowhere"))
    with pytest.raises(Stale, match="none of them"):
        stranger(p.RegisterTask("job", "x", p.NodeType.PS, 7, "127.0.0.1:1"))
    with pytest.raises(BadRequest, match="does not run"):
        call(p.MigrateTask("job", "launcher", p.NodeType.PS, 0))
    cluster.start()
    with pytest.raises(Conflict, match="is alive"):
        stranger(p.RegisterTask("job", "x", p.NodeType.CHIEF, 0))
    with pytest.raises(Stale, match="version 1 was announced last"):
        master.client(cluster.chief).call(p.Connected("job", cluster.chief, 9))
    with pytest.raises(Stale, match="is not the chief"):
        call(p.Connected("job", "launcher", 1))
    with pytest.raises(BadRequest, match="has no ps:3"):
        master.client(cluster.chief).call(p.ReportTask("job", cluster.chief, 1, p.NodeType.PS, 3, "refused"))
    with pytest.raises(BadRequest, match="never had a task 99"):
        call(p.Fenced("job", "launcher", 99))
