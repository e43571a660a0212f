"""Parameter server jobs, rule by rule: the launcher, the tasks and the chief are only their requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Conflict, Stale
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.effects import Deadline, Wake
from dlrover_hooks.master.core.events import ForgetFinished, Lost, Tick
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.ps_clusters.task_states import TRANSITIONS, diagram
from dlrover_hooks.protocol import NodeStatus, NodeType

CHIEF, PS, WORKER = NodeType.CHIEF, NodeType.PS, NodeType.WORKER
INITIAL, RUNNING, PRE_DROPPED = NodeStatus.INITIAL, NodeStatus.RUNNING, NodeStatus.PRE_DROPPED
FAILED, RELEASED = NodeStatus.FAILED, NodeStatus.RELEASED


class Cluster:
    """A job, with `now` in its hands. Tasks are named as TensorFlow does: `ps:0`."""

    def __init__(self, ps: int = 1, workers: int = 1, within_s: float = 60.0) -> None:
        self.state, self.now = job_registry.Master(), 1000.0
        self.scale(ps, workers, within_s)

    def send(self, event: p.Message) -> p.Message:
        return job_registry.apply(self.state, event, self.now).reply

    def scale(self, ps: int | None = None, workers: int | None = None, within_s: float = 60.0) -> None:
        self.send(p.ScaleTasks("job", "cli", ps, workers, within_s))

    @property
    def shown(self) -> p.Tasks:
        reply = views.query(self.state, Nodes(), p.ShowTasks("job"))
        assert isinstance(reply, p.Tasks)
        return reply

    def all(self, *statuses: NodeStatus) -> list[str]:
        """Names of the tasks with these statuses."""
        return [f"{one.type.value}:{one.index}" for one in self.shown.tasks if one.status in statuses]

    def one(self, name: str, status: NodeStatus) -> p.Task:
        """The only such task."""
        found = [one for one in self.shown.tasks if f"{one.type.value}:{one.index}" == name and one.status is status]
        assert len(found) == 1, self.shown
        return found[0]

    def register(self, name: str, address: str | None = None) -> p.Task:
        """The launcher has started the INITIAL task `name`."""
        task = self.one(name, INITIAL)
        address = f"host:{task.id}" if address is None else address
        return self.up(task, "" if task.type is CHIEF else address)

    def up(self, task: p.Task, address: str) -> p.Task:
        reply = self.send(p.RegisterTask("job", f"p{task.id}", task.type, task.index, address, task.id))
        assert isinstance(reply, p.Task)
        return reply

    def start(self) -> None:
        """Everything that is to be started is up."""
        for name in self.all(INITIAL):
            self.register(name)

    def fence(self, task: p.Task, code: int = -9) -> None:
        self.send(p.Fenced("job", "launcher", task.id, code))

    def lose(self, task: p.Task) -> None:
        self.send(Lost("job", task.incarnation, "no heartbeat"))

    def tick(self, after_s: float) -> None:
        self.now += after_s
        self.send(Tick("job"))

    @property
    def chief(self) -> str:
        return self.one("chief:0", RUNNING).incarnation

    def version(self, after: int = 0) -> p.PSCluster | None:
        """What the chief is given."""
        reply = views.query(self.state, Nodes(), p.AwaitCluster("job", self.chief, after))
        assert reply is None or isinstance(reply, p.PSCluster)
        return reply

    def connect(self, number: int, failed: str = "") -> None:
        self.send(p.Connected("job", self.chief, number, failed))

    @property
    def addresses(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those of the version that the chief is given."""
        given = self.version()
        assert given is not None
        return given.ps, given.workers


def running(ps: int = 1, workers: int = 1) -> Cluster:
    """Version 1 runs: the chief is task 1, then servers, then workers; their addresses are `host:ID`."""
    cluster = Cluster(ps, workers)
    cluster.start()
    cluster.connect(1)
    return cluster


# ---- the first version -----------------------------------------------------------------------------------------------


def test_a_chief_and_all_targets_are_to_be_started_and_the_first_version_waits_for_them() -> None:
    cluster = Cluster(ps=2, workers=1)
    assert cluster.all(INITIAL) == ["chief:0", "ps:0", "ps:1", "worker:0"]
    for name in ("chief:0", "worker:0", "ps:1"):
        cluster.register(name)
        assert cluster.version() is None
    cluster.register("ps:0")
    assert cluster.version() == p.PSCluster(1, ("host:2", "host:3"), ("host:4",), why="the first version")
    assert cluster.shown.acknowledged == 0
    cluster.connect(1)
    assert cluster.shown.acknowledged == 1


def test_the_first_version_waits_for_workers_only_so_long() -> None:
    cluster = Cluster(ps=1, workers=2, within_s=10.0)
    for name in ("chief:0", "ps:0", "worker:1"):
        cluster.register(name)
    cluster.tick(9.9)
    assert cluster.version() is None
    cluster.tick(0.1)
    assert cluster.addresses == (("host:2",), ("host:4",))
    cluster.connect(1)
    cluster.register("worker:0", "late:1")
    assert cluster.addresses == (("host:2",), ("late:1", "host:4"))


def test_a_server_that_never_comes_up_at_first_is_started_again() -> None:
    cluster = Cluster(within_s=10.0)
    cluster.register("worker:0")
    old = cluster.one("ps:0", INITIAL)
    cluster.tick(10.0)
    assert cluster.one("ps:0", RELEASED).id == old.id
    assert cluster.one("ps:0", INITIAL).id > old.id
    assert "ps:0 did not register within 10 s" in cluster.shown.problem
    with pytest.raises(Stale, match="released"):
        cluster.up(old, "host:1")
    cluster.tick(10.0)
    assert cluster.all(RELEASED, INITIAL).count("ps:0") == 2, "without a launcher the list must not grow"


def test_before_the_first_version_targets_change_at_once() -> None:
    cluster = Cluster(ps=3, workers=1)
    cluster.scale(ps=1)
    assert cluster.all(RELEASED) == ["ps:1", "ps:2"]
    cluster.start()
    assert cluster.addresses == (("host:2",), ("host:5",))


def test_only_the_first_targets_of_a_launcher_count() -> None:
    cluster = Cluster(ps=2, workers=2)
    cluster.send(p.ScaleTasks("job", "launcher", 1, 1, only_first=True))
    assert (cluster.shown.ps, cluster.shown.workers) == (2, 2)


# ---- planned changes -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SC-34", "SC-35")
def test_scale_up_starts_the_difference() -> None:
    """By the difference, INITIAL; then its status follows its process."""
    cluster = running()
    cluster.scale(ps=3)
    assert cluster.all(INITIAL) == ["ps:1", "ps:2"]
    cluster.register("ps:1")
    assert cluster.all(RUNNING).count("ps:1") == 1
    cluster.lose(cluster.one("ps:1", RUNNING))
    assert cluster.one("ps:1", FAILED).reason == "its lease expired"


@pytest.mark.requirement("SC-36")
def test_scale_up_is_announced_once_all_servers_run() -> None:
    cluster = running()
    cluster.scale(ps=3)
    cluster.register("ps:2")
    assert cluster.version(after=1) is None
    cluster.register("ps:1")
    assert cluster.version(after=1) == p.PSCluster(
        2, ("host:2", "host:4", "host:5"), ("host:3",), why="from 1 to 3 parameter servers, from 1 to 1 workers"
    )


@pytest.mark.requirement("SC-37")
@pytest.mark.requirement("SC-38")
def test_scale_down_keeps_the_servers_until_the_chief_has_left_them() -> None:
    """PRE_DROPPED is the queue: alive, not in the next version, stopped after the acknowledgement."""
    cluster = running(ps=3)
    cluster.scale(ps=1)
    assert cluster.addresses[0] == ("host:2",)
    assert cluster.all(PRE_DROPPED) == ["ps:1", "ps:2"]
    cluster.tick(1000.0)
    assert cluster.all(PRE_DROPPED) == ["ps:1", "ps:2"]
    cluster.connect(2)
    assert cluster.all(RELEASED) == ["ps:1", "ps:2"]
    for name in ("ps:1", "ps:2"):
        cluster.fence(cluster.one(name, RELEASED), 0)
    assert cluster.all(*NodeStatus) == ["chief:0", "ps:0", "worker:0"]


@pytest.mark.requirement("SC-41")
def test_migration_runs_the_new_one_first_and_releases_the_old_one_last() -> None:
    cluster = running(ps=2)
    cluster.send(p.MigrateTask("job", "cli", PS, 0))
    assert cluster.version(after=1) is None
    assert cluster.one("ps:0", RUNNING).address == "host:2"
    new = cluster.one("ps:0", INITIAL)
    cluster.up(new, "new:1")
    assert cluster.version(after=1) == p.PSCluster(2, ("new:1", "host:3"), ("host:4",), why="migrated: ps:0")
    assert cluster.one("ps:0", PRE_DROPPED).address == "host:2"
    cluster.connect(2)
    assert cluster.one("ps:0", RELEASED).address == "host:2"
    assert cluster.one("ps:0", RUNNING).id == new.id


def test_workers_are_added_and_removed_in_the_same_two_phases() -> None:
    cluster = running()
    cluster.scale(workers=2)
    cluster.register("worker:1")
    assert cluster.addresses[1] == ("host:3", "host:4")
    cluster.connect(2)
    cluster.scale(workers=1)
    assert cluster.addresses[1] == ("host:3",)
    assert cluster.all(PRE_DROPPED) == ["worker:1"]
    cluster.connect(3)
    assert cluster.all(RELEASED) == ["worker:1"]


def test_a_request_during_a_switch_is_carried_out_after_it() -> None:
    cluster = running()
    cluster.scale(ps=2)
    cluster.scale(ps=3)
    assert cluster.shown.ps == 3
    assert cluster.all(INITIAL) == ["ps:1"]
    cluster.register("ps:1")
    assert cluster.all(INITIAL) == []
    cluster.connect(2)
    assert cluster.all(INITIAL) == ["ps:2"]


def test_a_server_that_never_becomes_ready_is_rolled_back() -> None:
    """The target is set back, the job goes on, and the next request is carried out."""
    cluster = running()
    cluster.scale(ps=3, within_s=10.0)
    cluster.register("ps:1")
    cluster.tick(10.0)
    assert cluster.all(RELEASED) == ["ps:1", "ps:2"]
    assert "ps:2 did not register within 10 s: the job goes on with 1 parameter servers" in cluster.shown.problem
    assert (cluster.shown.ps, cluster.shown.version) == (1, 1)
    cluster.scale(ps=2)
    assert cluster.all(INITIAL) == ["ps:1"]
    assert cluster.shown.problem == ""


def test_a_switch_that_the_chief_cannot_make_is_rolled_back() -> None:
    cluster = running(ps=2)
    cluster.send(p.MigrateTask("job", "cli", PS, 0))
    cluster.scale(ps=3)
    cluster.register("ps:0")
    cluster.connect(2, failed="refused")
    assert cluster.version(after=2) == p.PSCluster(
        3, ("host:2", "host:3"), ("host:4",), why="version 2 was rolled back: refused"
    )
    assert "refused" in cluster.shown.problem
    assert cluster.all(RELEASED) == ["ps:0"]
    assert cluster.all(PRE_DROPPED) == []
    assert cluster.all(INITIAL) == []
    cluster.connect(3)
    assert cluster.all(INITIAL) == ["ps:2"]


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence_first", [False, True])
def test_a_crash_version_waits_for_the_fence_and_for_the_replacement(fence_first: bool) -> None:
    cluster = running(ps=2)
    dead = cluster.one("ps:1", RUNNING)
    cluster.lose(dead)
    assert cluster.version() is None, "no process is to connect to a dead server"
    steps = [lambda: cluster.fence(dead), lambda: cluster.register("ps:1", "new:1")]
    first, second = steps if fence_first else steps[::-1]
    first()
    assert cluster.version() is None
    second()
    assert cluster.version() == p.PSCluster(
        2, ("host:2", "new:1"), ("host:4",), crash=True, why="ps:1 is gone: its lease expired"
    )
    assert cluster.shown.version == 2


def test_the_chief_reports_a_server_that_it_cannot_reach() -> None:
    cluster = running(ps=2)
    dead = cluster.one("ps:1", RUNNING)
    cluster.send(p.ReportTask("job", cluster.chief, 7, PS, 1, "of another version"))
    assert cluster.all(FAILED) == []
    cluster.send(p.ReportTask("job", cluster.chief, 1, PS, 1, "Unavailable"))
    assert cluster.one("ps:1", FAILED).reason == "the chief cannot reach it: Unavailable"
    with pytest.raises(Stale):
        views.query(cluster.state, Nodes(), p.Heartbeat("job", dead.incarnation))
    cluster.fence(dead)
    cluster.register("ps:1", "new:1")
    cluster.send(p.ReportTask("job", cluster.chief, 1, PS, 1, "late"))
    assert cluster.all(FAILED) == []


def test_a_crash_makes_an_unacknowledged_switch_void() -> None:
    """Its new server dies: the chief may be on that version already."""
    cluster = running()
    cluster.scale(ps=2)
    cluster.register("ps:1")
    cluster.fence(cluster.one("ps:1", RUNNING))
    with pytest.raises(Stale, match="void"):
        cluster.connect(2)
    assert cluster.version(after=1) is None
    cluster.register("ps:1", "new:1")
    assert cluster.version(after=1) == p.PSCluster(
        3, ("host:2", "new:1"), ("host:3",), crash=True, why="ps:1 is gone: it ended with exit code -9"
    )


def test_the_loss_of_a_server_about_to_be_left_is_a_crash_unless_the_chief_has_left_it() -> None:
    cluster = running(ps=2)
    cluster.scale(ps=1)
    cluster.lose(cluster.one("ps:1", PRE_DROPPED))
    assert cluster.version(after=1) is None
    cluster.connect(2)
    assert cluster.shown.acknowledged == 2
    assert cluster.addresses[0] == ("host:2",)
    cluster.scale(ps=2)
    cluster.register("ps:1")
    cluster.connect(3)
    cluster.scale(ps=1)
    cluster.fence(cluster.one("ps:1", PRE_DROPPED))
    crash = cluster.version(after=4)
    assert crash is not None
    assert (crash.version, crash.crash, crash.ps) == (5, True, ("host:2",))


def test_a_replacement_that_never_comes_up_is_started_again() -> None:
    cluster = running()
    cluster.fence(cluster.one("ps:0", RUNNING))
    first = cluster.one("ps:0", INITIAL)
    cluster.tick(60.0)
    assert cluster.one("ps:0", RELEASED).id == first.id
    cluster.register("ps:0", "new:1")
    assert cluster.addresses[0] == ("new:1",)


def test_a_crash_does_not_wait_for_a_planned_change() -> None:
    """Nor does the change's time limit release a new task that has taken a dead one's place."""
    cluster = running(ps=2)
    cluster.send(p.MigrateTask("job", "cli", PS, 0))
    cluster.scale(ps=3)
    cluster.send(p.MigrateTask("job", "cli", WORKER, 0))
    cluster.fence(cluster.one("ps:0", RUNNING))
    cluster.register("ps:0", "new:1")
    assert cluster.addresses[0] == ("new:1", "host:3")
    cluster.tick(60.0)
    assert cluster.addresses[0] == ("new:1", "host:3")
    assert cluster.all(RELEASED) == []


def test_a_worker_that_comes_back_under_its_address_needs_no_new_version() -> None:
    cluster = running(workers=2)
    cluster.fence(cluster.one("worker:0", RUNNING))
    assert cluster.version(after=1) is None
    cluster.register("worker:0", "host:3")
    assert cluster.version(after=1) is None
    cluster.fence(cluster.one("worker:1", RUNNING))
    cluster.register("worker:1", "new:1")
    assert cluster.version(after=1) == p.PSCluster(2, ("host:2",), ("host:3", "new:1"), why="a worker was replaced")


def test_a_dead_worker_holds_no_version_back() -> None:
    cluster = running(workers=2)
    cluster.lose(cluster.one("worker:0", RUNNING))
    cluster.fence(cluster.one("ps:0", RUNNING))
    cluster.register("ps:0", "new:1")
    assert cluster.addresses == (("new:1",), ("host:4",))
    cluster.fence(cluster.one("worker:1", RUNNING))
    assert cluster.version() is None, "without a worker there is nothing to announce"
    cluster.register("worker:1", "new:2")
    assert cluster.addresses == (("new:1",), ("new:2",))


# ---- the chief -------------------------------------------------------------------------------------------------------


def test_a_new_chief_connects_to_the_present_version_and_until_then_nothing_is_removed() -> None:
    cluster = running(ps=2)
    cluster.scale(ps=1)
    old = cluster.one("chief:0", RUNNING)
    cluster.lose(old)
    cluster.register("chief:0")
    assert cluster.version() is None, "the old chief may still write to the servers"
    cluster.fence(old)
    assert cluster.addresses[0] == ("host:2",)
    assert cluster.all(PRE_DROPPED) == ["ps:1"]
    with pytest.raises(Stale, match="is not the chief"):
        cluster.send(p.Connected("job", old.incarnation, 2))
    cluster.connect(2)
    assert cluster.all(RELEASED) == ["ps:1"]


def test_a_new_chief_is_not_given_a_dead_worker() -> None:
    cluster = running(workers=2)
    cluster.lose(cluster.one("worker:0", RUNNING))
    cluster.fence(cluster.one("chief:0", RUNNING), 1)
    cluster.register("chief:0")
    assert cluster.version() == p.PSCluster(2, ("host:2",), ("host:4",), why="a listed worker is gone")


def test_two_chiefs_are_a_conflict() -> None:
    cluster = running()
    with pytest.raises(Conflict, match="which is alive"):
        cluster.send(p.RegisterTask("job", "other", CHIEF, 0))
    with pytest.raises(Conflict, match="which is alive"):
        cluster.send(p.RegisterTask("job", "other", CHIEF, 0, task=1))
    assert cluster.chief == "p1"


def test_acknowledging_again_is_fine_and_another_version_is_stale() -> None:
    cluster = running()
    cluster.connect(1)
    cluster.scale(ps=2)
    cluster.register("ps:1")
    cluster.connect(1)
    assert (cluster.shown.version, cluster.shown.acknowledged) == (2, 1)
    with pytest.raises(Stale, match="version 2 was announced last"):
        cluster.connect(3)
    cluster.connect(2)
    with pytest.raises(Stale):
        cluster.connect(1)


# ---- the end, and jobs without a launcher ----------------------------------------------------------------------------


@pytest.mark.parametrize("reaped", [False, True])
def test_a_chief_that_is_done_releases_the_others(reaped: bool) -> None:
    cluster = running()
    chief = cluster.one("chief:0", RUNNING)
    if not reaped:
        cluster.send(p.EndTasks("job", chief.incarnation))
        assert cluster.all(RUNNING) == ["chief:0"]
    cluster.fence(chief, 0)
    assert cluster.shown.finished
    assert cluster.all(*NodeStatus) == cluster.all(RELEASED) == ["ps:0", "worker:0"]
    with pytest.raises(Stale, match="finished"):
        cluster.scale(ps=2)
    view = views.query(cluster.state, Nodes(), p.ShowJob("job"))
    assert isinstance(view, p.JobView)
    assert view.finished
    cluster.send(ForgetFinished(before=cluster.now))
    assert "job" in cluster.state.jobs, "its processes live"
    for name in ("ps:0", "worker:0"):
        cluster.fence(cluster.one(name, RELEASED), 0)
    cluster.send(ForgetFinished(before=cluster.now))
    assert "job" not in cluster.state.jobs


def test_a_process_without_launcher_takes_its_place_and_fences_the_older_one() -> None:
    cluster = Cluster()
    for who, kind in (("c", CHIEF), ("s", PS), ("w", WORKER)):
        cluster.send(p.RegisterTask("job", who, kind, 0, f"{who}:1"))
    cluster.connect(1)
    cluster.lose(cluster.one("ps:0", RUNNING))
    cluster.send(p.RegisterTask("job", "s2", PS, 0, "s:2"))
    assert cluster.all(FAILED) == []
    crash = cluster.version(after=1)
    assert crash is not None
    assert (crash.ps, crash.crash) == (("s:2",), True)
    with pytest.raises(BadRequest, match="not started by a launcher"):
        cluster.send(p.MigrateTask("job", "cli", PS, 0))
    cluster.connect(2)
    cluster.send(p.EndTasks("job", "c"))
    for who in ("s2", "w", "c"):
        cluster.send(p.Leave("job", who, p.Departure.DONE))
    assert cluster.all(*NodeStatus) == []


def test_a_process_says_once_what_it_is() -> None:
    cluster = running()
    server = cluster.one("ps:0", RUNNING)
    again = p.RegisterTask("job", server.incarnation, PS, 0, server.address, server.id)
    assert cluster.send(again) == server
    with pytest.raises(BadRequest, match="incarnation of its own"):
        cluster.send(p.RegisterTask("job", server.incarnation, PS, 0, "other:1", server.id))


def test_a_deadline_is_set_for_the_next_start() -> None:
    state = job_registry.Master()
    outcome = job_registry.apply(state, p.ScaleTasks("job", "cli", 1, 1, 30.0), 1000.0)
    assert [effect for effect in outcome.effects if isinstance(effect, Deadline)] == [Deadline("job", 1030.0)]
    assert Wake("tasks job") in outcome.effects
    assert job_registry.decode(job_registry.encode(state)) == state


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_page_has_the_diagram_of_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "concepts" / "parameter-servers.md"
    assert f"```dot\n{diagram()}\n```" in page.read_text()


def test_every_state_can_be_reached_and_left() -> None:
    assert {before for before, _ in TRANSITIONS} == set(NodeStatus)
    assert {after for after in TRANSITIONS.values() if after} == set(NodeStatus) - {INITIAL}


SMALL, BIG, OTHER = p.NodeResource(cpu=1.0, memory=256), p.NodeResource(cpu=2.0, memory=512), p.NodeResource(cpu=3.0)


def resources(cluster: Cluster, *statuses: NodeStatus) -> dict[str, p.NodeResource]:
    return {f"{one.type.value}:{one.index}": one.resource for one in cluster.shown.tasks if one.status in statuses}


def of_small_servers() -> Cluster:
    cluster = Cluster.__new__(Cluster)
    cluster.state, cluster.now = job_registry.Master(), 1000.0
    cluster.send(p.ScaleTasks("job", "cli", 2, 1, 60.0, ps_resource=SMALL))
    cluster.start()
    cluster.connect(1)
    return cluster


def migrate(cluster: Cluster, index: int, resource: p.NodeResource | None) -> None:
    cluster.send(p.MigrateTask("job", "cli", PS, index, 60.0, resource))


def test_tasks_have_the_resources_of_their_type_and_so_have_their_replacements() -> None:
    cluster = of_small_servers()
    none = p.NodeResource()
    assert resources(cluster, RUNNING) == {"chief:0": none, "ps:0": SMALL, "ps:1": SMALL, "worker:0": none}
    cluster.fence(cluster.one("ps:1", RUNNING))
    assert resources(cluster, INITIAL) == {"ps:1": SMALL}


def test_a_migrated_task_gets_its_own_resources_and_keeps_them_through_a_crash_and_another_default() -> None:
    cluster = of_small_servers()
    migrate(cluster, 1, BIG)
    migrate(cluster, 1, BIG)
    assert resources(cluster, INITIAL) == {"ps:1": BIG}
    cluster.start()
    cluster.connect(2)
    assert resources(cluster, RUNNING)["ps:1"] == BIG
    cluster.send(p.ScaleTasks("job", "cli", ps=3, ps_resource=OTHER))
    assert resources(cluster, INITIAL) == {"ps:2": OTHER}
    cluster.start()
    cluster.connect(3)
    for name, resource in {"ps:0": SMALL, "ps:1": BIG, "ps:2": OTHER}.items():
        cluster.fence(cluster.one(name, RUNNING))
        assert resources(cluster, INITIAL)[name] == resource
    cluster.start()
    cluster.connect(cluster.shown.version)
    migrate(cluster, 1, None)
    assert resources(cluster, INITIAL) == {"ps:1": BIG}


def test_a_migration_that_is_rolled_back_leaves_the_resources_as_they_were() -> None:
    for give_up in (True, False):
        cluster = of_small_servers()
        migrate(cluster, 1, BIG)
        if give_up:
            cluster.tick(60.0)
        else:
            cluster.start()
            cluster.send(p.Connected("job", cluster.chief, 2, failed="cannot connect"))
        cluster.fence(max((one for one in cluster.shown.tasks if one.index == 1 and one.status is RELEASED),
                          key=lambda one: one.id), 0)  # fmt: skip
        cluster.fence(next(one for one in cluster.shown.tasks if one.index == 1 and one.status is RUNNING))
        assert resources(cluster, INITIAL) == {"ps:1": SMALL}


def test_a_migration_with_other_resources_follows_one_that_is_under_way() -> None:
    cluster = of_small_servers()
    migrate(cluster, 1, BIG)
    migrate(cluster, 1, OTHER)
    assert resources(cluster, INITIAL) == {"ps:1": BIG}
    cluster.start()
    cluster.connect(2)
    assert resources(cluster, INITIAL) == {"ps:1": OTHER}


def test_a_journal_of_an_older_release_has_no_resources() -> None:
    """Neither in its requests nor in its snapshots."""
    import msgspec

    from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters
    from dlrover_hooks.master.core.ps_clusters.task_states import TaskRecord

    new = {"resource", "resources", "ps_resource", "worker_resource", "out_of_memory"}
    for value in (
        PSClusters(tasks=[TaskRecord(1, PS, 0)]),
        p.Task(1, PS, 0, INITIAL),
        p.ScaleTasks("job", "cli", 1, 1),
        p.MigrateTask("job", "cli", PS, 0),
        p.Fenced("job", "launcher", 1, -9),
    ):
        plain = msgspec.to_builtins(value)
        tasks = plain.get("tasks", [])
        for table in (plain, *tasks):
            for name in new & set(table):
                del table[name]
        assert msgspec.convert(plain, type(value)) == value


def test_the_reason_of_a_task_that_was_killed_for_memory_is_known() -> None:
    cluster = of_small_servers()
    cluster.send(p.Fenced("job", "launcher", cluster.one("ps:1", RUNNING).id, -9, out_of_memory=True))
    cluster.start()
    version = views.query(cluster.state, Nodes(), p.AwaitCluster("job", cluster.chief, 1))
    assert isinstance(version, p.PSCluster)
    assert "killed for want of memory" in version.why
