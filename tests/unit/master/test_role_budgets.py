"""The budgets of a job of several roles: what they count, for how long, and what follows when they are used up."""

from __future__ import annotations

from pathlib import Path

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import Envelope, encode
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.metrics import Metrics
from dlrover_hooks.protocol import JobPhase, RoleBudgets, RoleRules
from tests.unit.master.role_world import (
    JOB,
    KILLED,
    NODE_LOST,
    PLENTY,
    PREEMPTED,
    RAISED,
    REWARD,
    ROLE,
    RoleWorld,
    actor,
)


def test_the_budget_of_a_role_for_its_workers_slides() -> None:
    world = RoleWorld(actor(worker=2))
    world.end(0)
    world.now += 600.0
    world.end(1)
    assert world.used("worker", "actor") == 2
    world.now += 400.0
    world.end(0)
    assert world.used("worker", "actor") == 2, "the first one is older than the window"
    world.now += 599.9
    world.end(0)
    assert world.phase is JobPhase.FAILED
    assert "the budget of 2 for 'worker actor' within 1000 s is used up" in world.show().reason
    assert world.show().budgets[0] == p.RestartCount("worker", "actor", 3, 2)


def test_the_budget_of_a_role_as_a_whole_slides() -> None:
    world = RoleWorld(actor(ROLE, role=1))
    world.end(0)
    world.now += 1000.0
    world.end(0)
    assert world.used("role", "actor") == 1
    assert world.phase is JobPhase.RUNNING
    world.end(1)
    assert world.phase is JobPhase.FAILED
    assert "the budget of 1 for 'role actor'" in world.show().reason


def test_the_budget_of_the_job_slides() -> None:
    world = RoleWorld(actor(JOB), budgets=RoleBudgets(job_restarts=1, window_s=100.0))
    world.end(0)
    world.now += 100.0
    world.end(0)
    assert world.used("job") == 1
    assert world.phase is JobPhase.RUNNING
    world.end(1)
    assert world.phase is JobPhase.FAILED
    assert "the budget of 1 for 'job' within 100 s" in world.show().reason


def test_budgets_of_different_roles_are_apart() -> None:
    world = RoleWorld(actor(worker=1), RoleRules("reward", 1, worker_restarts=1, driver=False))
    world.end(0)
    world.end(0, role="reward")
    assert world.phase is JobPhase.RUNNING
    assert (world.used("worker", "actor"), world.used("worker", "reward")) == (1, 1)
    world.end(0, role="reward")
    assert world.phase is JobPhase.FAILED
    assert "'worker reward'" in world.show().reason


def test_a_node_with_too_many_failures_is_avoided_and_does_not_end_the_job() -> None:
    world = RoleWorld(actor(workers=3), budgets=RoleBudgets(node_failures=2, window_s=100.0))
    for _ in range(2):
        world.end(0)
        world.register(0, node="bad")
    world.now += 50.0
    world.end(0)
    world.register(0, node="bad")
    world.end(0, RAISED)
    world.register(0, node="bad")
    world.end(0, PREEMPTED)
    world.register(0, node="bad")
    assert world.used("node", "bad") == 2, "neither exceptions nor preemptions are failures of a node"
    assert world.show().avoid == ()
    world.lose(0)
    assert world.show().avoid == ("bad",)
    assert [(one.kind, one.detail) for one in world.show().events if one.kind == "avoid"] == [("avoid", "bad")]
    world.register(0, node="bad")
    world.end(0)
    assert world.show().avoid == ("bad",)
    assert world.kinds.count("avoid") == 1
    assert world.phase is JobPhase.RUNNING


def test_a_node_that_was_relaunched_begins_without_failures() -> None:
    world = RoleWorld(budgets=RoleBudgets(node_failures=0))
    world.register(0, node="bad")
    for node in ("bad", "other"):
        world.end(0)
        world.register(0, node=node)
    assert world.show().avoid == ("n0", "bad")
    world.send(p.NodesRelaunched("job", "prime", ("bad", "unknown")))
    world.send(p.NodesRelaunched("job", "prime", ("bad",)))
    assert world.show().avoid == ("n0",)
    assert "bad" not in [one.of for one in world.show().budgets]
    assert world.kinds.count("relaunched") == 1
    world.end(0)
    assert world.show().avoid == ("n0", "other")
    world.register(0, node="bad")
    world.end(0)
    assert world.show().avoid == ("n0", "other", "bad"), "it is avoided again after other failures"


def test_failures_of_a_node_that_are_older_than_the_window_do_not_count() -> None:
    world = RoleWorld(budgets=RoleBudgets(node_failures=1, window_s=100.0))
    for _ in range(4):
        world.end(0, NODE_LOST)
        world.register(0, node="n0")
        world.now += 100.0
    assert world.used("node", "n0") == 1
    assert world.show().avoid == ()


def test_preemptions_are_counted_apart_and_are_unlimited() -> None:
    world = RoleWorld(actor(worker=0))
    for _ in range(20):
        world.end(0, PREEMPTED, detail="it has saved and left")
        world.register(0)
    assert (world.used("preemption"), world.used("worker", "actor")) == (20, 0)
    assert world.worker(0).life == 21
    assert world.phase is JobPhase.RUNNING


def test_preemptions_may_have_a_limit() -> None:
    world = RoleWorld(budgets=RoleBudgets(preemptions=1, window_s=100.0))
    world.end(0, PREEMPTED)
    world.now += 100.0
    world.end(1, PREEMPTED)
    assert world.phase is JobPhase.RUNNING
    world.end(0, PREEMPTED)
    assert world.phase is JobPhase.FAILED
    assert "the budget of 1 for 'preemption'" in world.show().reason


def test_budgets_of_unlimited_are_never_used_up() -> None:
    unlimited = actor(JOB, worker=p.UNLIMITED, role=p.UNLIMITED)
    world = RoleWorld(unlimited, budgets=RoleBudgets(job_restarts=p.UNLIMITED, node_failures=p.UNLIMITED))
    for _ in range(50):
        world.end(0)
        world.register_all()
    assert world.phase is JobPhase.RUNNING
    assert world.show().avoid == ()
    assert (world.used("worker", "actor"), world.used("job")) == (50, 50)


def test_budgets_survive_a_restart_of_the_master(tmp_path: Path) -> None:
    """Upstream's defect 10: what was counted after the last save of its master was forgotten in a crash of it."""
    world = RoleWorld(actor(worker=2), up=False)
    journal = SqliteJournal(tmp_path / "journal")

    def send(event: p.Message) -> None:
        world.send(event)
        journal.append([encode(Envelope(now=world.now, event=event))])

    world.state = job_registry.Master()
    send(p.StartRoles("job", "user", "first", (actor(worker=2), REWARD), PLENTY))
    for life in (1, 2):
        send(p.WorkerEnded("job", "sub-master", "actor", 0, life, KILLED))
    journal.close()
    before = world.show()
    journal = SqliteJournal(tmp_path / "journal")
    world.state = journal.load()
    assert world.show() == before
    assert (world.used("worker", "actor"), world.lives["actor"]) == (2, [3, 1])
    send(p.WorkerEnded("job", "sub-master", "actor", 1, 1, KILLED))
    journal.close()
    assert world.phase is JobPhase.FAILED


def test_metrics_show_the_workers_and_the_budgets_of_a_job_that_runs() -> None:
    world = RoleWorld(actor(worker=3), budgets=PLENTY)
    world.end(1, KILLED)
    text = Metrics().text(world.state, Nodes()).decode()
    assert 'dlrover_hooks_role_workers{job="job",role="actor",state="running"} 1.0' in text
    assert 'dlrover_hooks_role_workers{job="job",role="actor",state="initial"} 1.0' in text
    assert 'dlrover_hooks_role_lives_total{job="job",role="actor"} 3.0' in text
    assert 'dlrover_hooks_budget_used{budget="worker",job="job",of="actor"} 1.0' in text
    assert 'dlrover_hooks_budget_limit{budget="worker",job="job",of="actor"} 3.0' in text
    world.stop()
    assert "dlrover_hooks_role_workers{" not in Metrics().text(world.state, Nodes()).decode()
