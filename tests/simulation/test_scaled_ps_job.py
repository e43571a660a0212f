"""The plans of one parameter server job in virtual time: numbers and sizes of its tasks, whatever these do."""

from __future__ import annotations

import msgspec
import pytest

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.events import PlanMade
from dlrover_hooks.master.core.job_scaling.plan_verification import PlanOutcome
from dlrover_hooks.master.core.job_scaling.ps_manager import PSManager
from dlrover_hooks.master.scaling.job_resource_optimizer import situation
from dlrover_hooks.protocol import (
    AwaitNodes,
    NodeGroupResource,
    NodeResource,
    NodeStatus,
    NodeType,
    OptimizeStage,
    ResourceLimits,
    ResourcePlan,
    ScaleNodes,
    ScaleTasks,
    ScalingMode,
    ScalingPace,
    StartScaling,
)
from tests.simulation.scaled_job import JOB, Faults
from tests.simulation.scaled_ps_job import Model, ScaledPSJob

PS, WORKER = NodeType.PS, NodeType.WORKER
LIMITS = ResourceLimits(32, 1 << 17, max_workers=8, max_ps=4)
HOUR_S = 3600.0


def manual(limits: ResourceLimits = LIMITS, model: Model | None = None) -> ScaledPSJob:
    job = ScaledPSJob(limits, mode=ScalingMode.MANUAL, model=model)
    job.run(60.0)
    return job


def manager(job: ScaledPSJob) -> PSManager:
    return PSManager(job.clusters, job.scaling, job.now)


def groups(job: ScaledPSJob, ps: int, workers: int) -> ResourcePlan:
    now = manager(job).groups()
    counts = {"ps": ps, "worker": workers}
    return ResourcePlan({name: NodeGroupResource(n, now[name].node_resource) for name, n in counts.items()})


@pytest.mark.requirement("SC-6", "SC-7", "SC-8", "SC-9", "SC-10")
def test_a_job_goes_through_the_four_stages_and_each_asks_for_a_plan() -> None:
    job = ScaledPSJob(LIMITS)
    seen = [job.scaling.stage]
    for _ in range(1200):
        job.run(1.0)
        if job.scaling.stage is not seen[-1]:
            seen.append(job.scaling.stage)
    assert seen == [OptimizeStage.WORKER_INITIAL, OptimizeStage.PS_INITIAL, OptimizeStage.RUNNING]  # CREATE is at once
    reasons = [one.reason for one in job.scaling.history.records]
    assert reasons[:3] == [
        "the first nodes of the job",
        "the size of the workers, by what the first ones use",
        "the parameter servers that the workers need",
    ]


def test_the_tasks_that_pay_are_found_while_tasks_fail() -> None:
    job = ScaledPSJob(LIMITS, faults=Faults(noise=0.01, fails_every_s=2000.0), seed=1)
    job.run(3 * HOUR_S)
    best = LIMITS.max_workers / job.model.worker_s
    assert job.speed >= 0.85 * best
    assert len(job.running(WORKER)) >= 7
    assert job.replayed() == job_registry.encode(job.state)


@pytest.mark.parametrize("seed", range(10))
def test_tasks_fail_hang_and_come_late(seed: int) -> None:
    faults = Faults(start_s=(1.0, 150.0), hangs=0.15, fails_every_s=600.0, noise=0.02)
    job = ScaledPSJob(LIMITS, seed=seed, faults=faults)
    job.run(3 * HOUR_S)
    job.faults = Faults()
    job._queue = [one for one in job._queue if one[2] != job._fail_one]  # pyright: ignore[reportPrivateUsage]
    job.run(900.0)
    assert (len(job.running(PS)), len(job.running(WORKER))) == (job.clusters.ps, job.clusters.workers)
    assert job.speed > 0
    assert job.replayed() == job_registry.encode(job.state)


def test_a_hot_server_is_migrated_to_more_cores() -> None:
    """A user has throttled the servers; once the user's plan is released, they get the cores that the workers need."""
    job = manual(ResourceLimits(32, 1 << 17, max_workers=8, max_ps=1), model=Model(server_cpu=0.2))
    slow = ResourcePlan({"ps": NodeGroupResource(1, NodeResource(0.3, 8192)), "worker": NodeGroupResource(2)})
    job.apply(ScaleNodes(JOB, "cli", slow))
    job.run(60.0)
    (before,) = job.running(PS)
    assert before.resource.cpu == 0.3
    limits, pace = job.scaling.limits, ScalingPace(start_s=120.0)
    job.apply(StartScaling(JOB, "launcher", ScalingMode.SINGLE_JOB, limits, pace=pace, ps=True))
    job.apply(ScaleNodes(JOB, "cli", release=True))
    job.run(1500.0)
    hot = next(one for one in job.scaling.history.records if one.plan.node_resources)
    assert "more cores for parameter servers" in hot.reason
    assert hot.outcome is PlanOutcome.KEPT
    assert all(task.resource.cpu >= 0.8 for task in job.running(PS))
    assert before.id not in [task.id for task in job.clusters.tasks]


@pytest.mark.requirement("SC-40", "SC-42")
def test_a_server_of_another_size_is_migrated_and_the_old_one_is_removed_last() -> None:
    job = manual()
    job.apply(ScaleNodes(JOB, "cli", groups(job, 2, 2)))
    job.run(60.0)
    old, other = job.running(PS)
    larger = msgspec.structs.replace(old.resource, cpu=old.resource.cpu + 4)
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan(node_resources={"ps:0": larger})))
    (new,) = manager(job).scale_plan().launch_nodes
    assert (new.type, new.config_resource) == (PS, larger)
    job.run(5.5)  # it runs, and the chief is about to connect to it
    assert manager(job).scale_plan().ps_addrs == [f"host:{new.id}", f"host:{other.id}"]
    assert not manager(job).scale_plan().remove_nodes
    job._follow = lambda: None  # type: ignore[method-assign]  # nothing is reaped
    job.run(5.0)
    assert [node.id for node in manager(job).scale_plan().remove_nodes] == [old.id]
    assert [task.id for task in job.running(PS)] == [new.id, other.id]


@pytest.mark.requirement("SC-3", "SC-33", "SC-39")
def test_servers_that_a_plan_leaves_out_are_removed_once_the_chief_has_left_them() -> None:
    job = manual()
    job.apply(ScaleNodes(JOB, "cli", groups(job, 3, 1)))
    assert [node.type for node in manager(job).scale_plan().launch_nodes] == [PS, PS]
    job.run(60.0)
    gone = [task.id for task in job.running(PS)[1:]]
    job._follow = lambda: None  # type: ignore[method-assign]  # the chief does not connect yet
    job.apply(ScaleNodes(JOB, "cli", groups(job, 1, 1)))
    assert not manager(job).scale_plan().remove_nodes
    assert [task.id for task in job.clusters.tasks if task.status is NodeStatus.PRE_DROPPED] == gone
    announced = job.clusters.announced
    assert announced is not None
    job._connect(announced.number)
    plan = manager(job).scale_plan()
    assert [node.id for node in plan.remove_nodes] == gone
    assert len(plan.ps_addrs) == 1


@pytest.mark.requirement("SC-35", "SC-43", "SC-44")
def test_new_workers_are_initial_and_run_once_they_register() -> None:
    job = manual()
    job.apply(ScaleNodes(JOB, "cli", groups(job, 1, 3)))
    new = [task for task in job.clusters.tasks if task.type is WORKER and task.index > 0]
    assert [task.status for task in new] == [NodeStatus.INITIAL] * 2
    job.run(60.0)
    assert [task.status for task in new] == [NodeStatus.RUNNING] * 2


def test_a_worker_gets_another_size_while_it_runs() -> None:
    job = manual()
    (before,) = job.running(WORKER)
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"worker": NodeGroupResource(1, NodeResource(2.0, 3000))})))
    job.run(60.0)
    (after,) = job.running(WORKER)
    assert after.id == before.id
    assert after.resource == NodeResource(2.0, 3000)


def test_a_server_killed_for_memory_is_started_again_with_twice_as_much() -> None:
    job = ScaledPSJob(LIMITS, mode=ScalingMode.MANUAL, model=Model(memory=10_000))
    job.run(300.0)
    sizes = [job.sizes[number].memory for number, name in job.started.items() if name == "ps:0"]
    assert sizes == [8192, 16384]
    assert [task.resource.memory for task in job.running(PS)] == [16384]
    assert [one.reason for one in job.scaling.history.records][-1] == "ps:0 used up the memory"
    assert not job.clusters.out_of_memory
    assert job.replayed() == job_registry.encode(job.state)


def test_servers_that_all_hold_too_much_become_more() -> None:
    """Each has 64 GiB and its share of the model: no node may have more, so there are twice as many."""
    limits = ResourceLimits(64, 1 << 20, max_ps=8)
    job = ScaledPSJob(limits, mode=ScalingMode.MANUAL, model=Model(memory=100_000))
    job.run(600.0)
    assert [task.resource.memory for task in job.running(PS)] == [65536, 65536]
    assert job.speed > 0


def test_a_server_that_does_not_start_takes_the_plan_back() -> None:
    job = ScaledPSJob(LIMITS)
    job.run(1200.0)
    before = (len(job.running(PS)), len(job.running(WORKER)))
    job.faults = Faults(hangs=1.0)
    job.run(900.0)
    back = [one for one in job.scaling.history.records if one.outcome is PlanOutcome.ROLLED_BACK]
    assert back
    assert all("did not all run within 120 s" in one.decided for one in back)
    assert (len(job.running(PS)), len(job.running(WORKER))) == before
    assert job.speed > 0


def test_a_plan_of_numbers_alone_leaves_sizes_and_other_numbers_as_they_are() -> None:
    job = manual()
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"ps": NodeGroupResource(2)})))
    job.run(60.0)
    small, other = job.running(PS)
    larger = msgspec.structs.replace(small.resource, cpu=9.0)
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan(node_resources={"ps:0": larger})))
    job.run(60.0)
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"ps": NodeGroupResource(3)})))
    job.run(60.0)
    assert [task.resource.cpu for task in job.running(PS)] == [9.0, 7.0, 9.0]
    assert [task.id for task in job.running(PS)][1] == other.id
    assert len(job.running(WORKER)) == 1


def test_a_job_that_is_launched_again_keeps_its_tasks_and_without_a_mode_is_not_planned_any_more() -> None:
    job = manual()
    job.apply(ScaleNodes(JOB, "cli", groups(job, 2, 2)))
    job.run(60.0)
    job.apply(StartScaling(JOB, "launcher 2", ScalingMode.MANUAL, ResourceLimits(32, 1 << 17, max_ps=1), ps=True))
    job.run(60.0)
    assert (len(job.running(PS)), len(job.running(WORKER))) == (1, 2)
    job.apply(ScaleTasks(JOB, "launcher 3", 1, 1, only_first=True))
    assert job.state.jobs[JOB].scaling is None
    assert (job.clusters.ps, job.clusters.workers) == (1, 2)


def test_a_plan_that_was_asked_for_before_the_limits_changed_stays_within_them() -> None:
    job = ScaledPSJob(LIMITS)
    job.run(60.0)
    smaller = ResourceLimits(32, 1 << 17, max_workers=2, max_ps=1)
    job.apply(StartScaling(JOB, "launcher 2", ScalingMode.SINGLE_JOB, smaller, ps=True))
    plan = ResourcePlan({"ps": NodeGroupResource(3), "worker": NodeGroupResource(7)})
    job.apply(PlanMade(JOB, plan, OptimizeStage.RUNNING, "by the model", verified=False))
    job.run(60.0)
    assert (len(job.running(PS)), len(job.running(WORKER))) == (1, 2)
    groups = job.scaling.history.records[-1].plan.node_group_resources
    assert [(name, group.count) for name, group in sorted(groups.items())] == [("ps", 1), ("worker", 2)]


class LatePlans(ScaledPSJob):
    """Plans are made, and wait in `late` until `give` is called."""

    def __init__(self) -> None:
        self.late: list[PlanMade] = []
        super().__init__(LIMITS, mode=ScalingMode.MANUAL)

    def _plan(self) -> None:
        event = self.manager.plan(situation(self.state.jobs[JOB], self.scaling, self.now), self.now)
        if event is not None:
            self.late.append(event)

    def give(self) -> None:
        self.apply(self.late.pop())
        self.late.clear()


def test_a_users_plan_that_comes_before_the_first_plan_wins_and_the_job_goes_on() -> None:
    """The first plan gives what the user's leaves out. Nodes that are killed for memory later get a plan, too."""
    job = LatePlans()
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"worker": NodeGroupResource(3, NodeResource(1.0, 2048))})))
    assert job.scaling.stage is OptimizeStage.CREATE
    job.give()
    assert job.scaling.stage is OptimizeStage.WORKER_INITIAL
    job.run(60.0)
    assert [task.resource for task in job.running(WORKER)] == [NodeResource(1.0, 2048)] * 3
    assert len(job.running(PS)) == 1
    job.kill(job.running(WORKER)[0].id, out_of_memory=True)
    job.give()
    job.run(60.0)
    assert len(job.running(WORKER)) == 3
    assert job.replayed() == job_registry.encode(job.state)


def test_what_is_refused() -> None:
    job = manual()
    with pytest.raises(BadRequest, match="may have 1 to 4 parameter servers, not 5"):
        job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"ps": NodeGroupResource(5)})))
    with pytest.raises(BadRequest, match="A plan for 'evaluator'"):
        job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"evaluator": NodeGroupResource(1)})))
    with pytest.raises(BadRequest, match="A plan for 'ps:7'"):
        job.apply(ScaleNodes(JOB, "cli", ResourcePlan(node_resources={"ps:7": NodeResource(cpu=1)})))
    with pytest.raises(BadRequest, match="are planned by this master"):
        job.apply(ScaleTasks(JOB, "cli", 2, 2))
    with pytest.raises(BadRequest, match="has parameter servers"):
        job.apply(StartScaling(JOB, "launcher", ScalingMode.MANUAL, LIMITS))
    with pytest.raises(BadRequest, match="are tasks"):
        views.query(job.state, job.nodes, AwaitNodes(JOB, "cli"))
    job.apply(ScaleTasks("another", "launcher", 1, 1))
    with pytest.raises(Stale, match="not planned"):
        job.apply(ScaleNodes("another", "cli"))
