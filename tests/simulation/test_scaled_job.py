"""The plans of one job in virtual time: the number of workers that pays is found and kept, whatever nodes do."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.job_scaling.plan_verification import PlanOutcome
from dlrover_hooks.master.core.job_scaling.worker_manager import WorkerManager
from dlrover_hooks.protocol import (
    NodeExit,
    NodeGroupResource,
    NodeResource,
    NodeStatus,
    OptimizeStage,
    ResourceLimits,
    ResourcePlan,
    ScaleNodes,
    ScaleTasks,
    ScalingMode,
    ScalingPace,
    StartScaling,
)
from tests.deep import deep
from tests.simulation.scaled_job import JOB, Faults, ScaledJob

LIMITS = ResourceLimits(64, 1 << 18, max_workers=16)
HOUR_S = 3600.0
Speed = Callable[[int], float]


def scales_well(workers: int) -> float:
    return workers / (0.5 + 0.02 * workers)


def saturates(workers: int) -> float:
    """Pays up to about four workers."""
    return 1 / (0.05 + 0.4 / workers + 0.02 * max(0, workers - 2))


def gets_slower(workers: int) -> float:
    return 1.0 / workers**0.5


def best(speed: Speed, most: int = 16) -> float:
    return max(speed(count) for count in range(1, most + 1))


def set_workers(count: int, *, cpu: float = 0.0, release: bool = False) -> ScaleNodes:
    plan = ResourcePlan({"worker": NodeGroupResource(count, NodeResource(cpu=cpu))}) if count else ResourcePlan()
    return ScaleNodes(JOB, "cli", plan, release=release)


@pytest.mark.requirement("SC-2", "SC-21")
@pytest.mark.parametrize("speed", [scales_well, saturates, gets_slower])
@pytest.mark.parametrize("seed", [0, deep(1), deep(2)])
def test_the_number_that_pays_is_found(speed: Speed, seed: int) -> None:
    job = ScaledJob(speed, LIMITS, seed=seed, faults=Faults(noise=0.01))
    job.run(2 * HOUR_S)
    workers = len(job.running)
    assert speed(workers) >= 0.88 * best(speed)
    assert job.scaling.stage is OptimizeStage.RUNNING
    fewer = [count for count in range(1, workers) if speed(count) >= 0.99 * best(speed)]
    assert not fewer or speed is scales_well


def test_a_job_that_gets_slower_goes_back_to_one_worker() -> None:
    job = ScaledJob(gets_slower, LIMITS)
    job.run(HOUR_S)
    records = job.scaling.history.records
    assert [one.outcome for one in records if one.outcome is PlanOutcome.ROLLED_BACK]
    assert len(job.running) == 1
    assert max(count for _, count in job.counts) == 2  # one try, and not another one within the hour


@pytest.mark.parametrize("seed", [*range(4), *map(deep, range(4, 12))])
def test_nodes_fail_hang_and_come_late(seed: int) -> None:
    faults = Faults(start_s=(1.0, 400.0), hangs=0.2, fails_every_s=900.0, noise=0.02)
    pace = ScalingPace(start_s=300.0)
    job = ScaledJob(scales_well, LIMITS, seed=seed, faults=faults, pace=pace)
    job.run(3 * HOUR_S)
    job.faults = msgspec.structs.replace(faults, hangs=0.0, start_s=(1.0, 5.0))
    job._queue = [one for one in job._queue if one[2] != job._fail_one]  # pyright: ignore[reportPrivateUsage]
    job.run(600.0)
    wanted = {node.shown.name for node in job.scaling.present}
    assert set(job.running) == wanted
    assert len(wanted) == job.scaling.workers >= 1
    assert job.steps > 0
    assert job.replayed() == job_registry.encode(job.state)


def test_plans_do_not_follow_each_other_faster_than_the_cool_down() -> None:
    job = ScaledJob(saturates, LIMITS, faults=Faults(noise=0.05), seed=3)
    job.run(3 * HOUR_S)
    made = [one.made_at for one in job.scaling.history.records if one.before is not None]
    assert made
    assert all(after - before >= 300.0 for before, after in itertools.pairwise(made))
    assert len(made) <= 20


def test_a_node_that_fails_is_replaced_by_another_one_until_the_budget_is_used_up() -> None:
    job = ScaledJob(scales_well, LIMITS, relaunches=2)
    job.run(30.0)
    for _ in range(3):
        (name,) = job.running
        job.end(name, NodeExit.KILLED, 137)
        job.run(10.0)
    scaling = job.scaling
    assert scaling.finished
    assert scaling.exit_code == 137
    assert "worker-2 ended (killed, exit code 137)" in scaling.failure
    assert "more than 2" in scaling.failure
    assert sorted(job.started) == ["worker-0", "worker-1", "worker-2"]


def test_a_node_that_is_preempted_is_replaced_and_counts_as_no_failure() -> None:
    job = ScaledJob(scales_well, LIMITS, relaunches=0)
    job.run(30.0)
    for number in range(5):
        (name,) = job.running
        job.end(name, NodeExit.PREEMPTED, 75)
        job.run(30.0)
        assert list(job.running) == [f"worker-{number + 1}"]
    assert not job.scaling.finished


def test_a_users_error_ends_the_job_at_once() -> None:
    job = ScaledJob(scales_well, LIMITS)
    job.run(30.0)
    job.end("worker-0", NodeExit.USER_ERROR, 1, "ZeroDivisionError")
    assert job.scaling.finished
    assert job.scaling.failure == "worker-0 ended with exit code 1: ZeroDivisionError"
    job.run(60.0)
    assert not job.running


def test_a_job_ends_when_its_workers_are_done() -> None:
    job = ScaledJob(scales_well, ResourceLimits(64, 1 << 18, min_workers=2, max_workers=2))
    job.run(30.0)
    job.end("worker-0", NodeExit.SUCCEEDED)
    assert not job.scaling.finished
    assert len(job.started) == 2
    job.end("worker-1", NodeExit.SUCCEEDED)
    assert job.scaling.finished
    assert not job.scaling.failure


@pytest.mark.requirement("SC-45")
def test_additional_workers_are_released_and_not_relaunched() -> None:
    job = ScaledJob(scales_well, ResourceLimits(64, 1 << 18, min_workers=1, max_workers=4))
    job.run(30.0)
    job.apply(set_workers(3))
    job.run(30.0)
    assert len(job.running) == 3
    job._follow = lambda: None  # type: ignore[method-assign]  # the platform has not removed them yet
    job.apply(set_workers(1))
    released = [node for node in job.scaling.nodes if node.status is NodeStatus.RELEASED]
    assert [(node.id, node.relaunchable, node.is_released) for node in released] == [(1, False, True), (2, False, True)]
    job.end("worker-2", NodeExit.KILLED, 137)  # it is to end anyway: nothing takes its place
    assert [node.id for node in job.scaling.present] == [0]
    assert not job.scaling.failed_at


@pytest.mark.requirement("SC-25", "SC-26")
def test_a_plan_is_turned_into_nodes_to_launch_and_to_remove() -> None:
    job = ScaledJob(scales_well, ResourceLimits(64, 1 << 18, min_workers=2, max_workers=4))
    job.run(30.0)
    manager, size = WorkerManager(job.scaling, job.now), job.scaling.worker_resource
    grown = manager.carry_out(NodeGroupResource(4, size))
    assert [node.name for node in grown.launch_nodes] == ["worker-2", "worker-3"]
    assert grown.node_group_resource == NodeGroupResource(4, size)
    shrunk = manager.carry_out(NodeGroupResource(1, size))
    assert [node.name for node in shrunk.remove_nodes] == ["worker-1", "worker-2", "worker-3"]
    assert not shrunk.launch_nodes


def test_a_plan_of_a_user_holds_until_it_is_released() -> None:
    job = ScaledJob(scales_well, LIMITS)
    job.run(30.0)
    job.apply(set_workers(3))
    job.run(HOUR_S)
    assert len(job.running) == 3
    assert [one.reason for one in job.scaling.history.records][-1] == "asked for by a user"
    plans = job.scaling.history.made
    job.apply(set_workers(3))
    assert job.scaling.history.made == plans, "nothing was to be changed"
    job.apply(set_workers(0, release=True))
    job.run(HOUR_S)
    assert len(job.running) > 3


def test_in_manual_mode_nothing_is_planned_but_the_first_nodes() -> None:
    job = ScaledJob(scales_well, LIMITS, mode=ScalingMode.MANUAL)
    job.run(HOUR_S)
    assert len(job.running) == 1
    assert len(job.scaling.history.records) == 1


def test_workers_killed_for_memory_get_twice_as_much() -> None:
    job = ScaledJob(scales_well, LIMITS, faults=Faults(out_of_memory_above=12000))
    job.run(60.0)
    assert job.started["worker-0"].config_resource.memory == 8192
    assert job.started["worker-1"].config_resource.memory == 16384
    assert list(job.running) == ["worker-1"]
    reasons = [one.reason for one in job.scaling.history.records]
    assert "worker-0 used up the memory" in reasons


def test_a_node_that_does_not_start_is_asked_for_with_fewer_cores() -> None:
    job = ScaledJob(scales_well, LIMITS, faults=Faults(hangs=1.0))
    job.run(890.0)
    job.faults = Faults()
    job.run(60.0)
    assert job.started["worker-0"].config_resource.cpu == 13
    assert list(job.running) == ["worker-1"]
    assert job.started["worker-1"].config_resource.cpu == 6.5
    assert job.scaling.problem == "worker-0 did not start within 900 s"


def test_a_node_that_does_not_start_keeps_the_size_that_its_user_gave_it() -> None:
    size = NodeResource(cpu=8.0, memory=2048)
    job = ScaledJob(scales_well, LIMITS, size=size, faults=Faults(hangs=1.0))
    job.run(890.0)
    job.faults = Faults()
    job.run(60.0)
    assert job.started["worker-1"].config_resource == size


def test_a_launcher_that_was_restarted_gets_other_nodes() -> None:
    job = ScaledJob(scales_well, LIMITS)
    job.run(HOUR_S)
    before, plans = len(job.running), job.scaling.history.made
    job.running.clear()
    job.apply(StartScaling(JOB, "launcher 2", ScalingMode.SINGLE_JOB, LIMITS))
    job.run(30.0)
    assert len(job.running) == before
    assert job.scaling.history.made == plans  # what was learned is not lost
    assert not set(job.running) & {f"worker-{n}" for n in range(before)}


def test_nodes_that_run_elsewhere_are_kept_by_a_launcher_that_was_restarted() -> None:
    job = ScaledJob(scales_well, LIMITS, mode=ScalingMode.MANUAL)
    job.run(30.0)
    job.apply(set_workers(3))
    job.run(30.0)
    before = {node.shown.name for node in job.scaling.nodes}
    job.apply(StartScaling(JOB, "another", ScalingMode.MANUAL, LIMITS, keep_nodes=True))
    assert {node.shown.name for node in job.scaling.nodes} == before
    job.end("worker-0", NodeExit.USER_ERROR, 3)
    assert job.scaling.finished
    job.apply(StartScaling(JOB, "a third", ScalingMode.MANUAL, LIMITS, keep_nodes=True))
    assert (job.scaling.finished, job.scaling.exit_code) == (True, 3)


@pytest.mark.parametrize("size", [NodeResource(), NodeResource(cpu=2.0, memory=3000)])
def test_plans_keep_the_size_that_the_user_has_given(size: NodeResource) -> None:
    job = ScaledJob(saturates, LIMITS, size=size)
    job.run(HOUR_S)
    assert len(job.running) > 1
    assert {node.config_resource for node in job.started.values()} == {size}


def test_nodes_killed_for_memory_get_more_than_their_user_gave_them_and_keep_it() -> None:
    faults = Faults(out_of_memory_above=5000)
    job = ScaledJob(saturates, LIMITS, size=NodeResource(cpu=2.0, memory=3000), faults=faults)
    job.run(HOUR_S)
    sizes = [node.config_resource for node in job.started.values()]
    assert sizes[0] == NodeResource(cpu=2.0, memory=3000)
    assert {size.memory for size in sizes[-2:]} == {6000}
    assert {size.cpu for size in sizes} == {2.0}


def test_the_first_plan_of_a_user_has_the_size_that_was_given() -> None:
    size = NodeResource(cpu=2.0, memory=3000)
    job = ScaledJob(scales_well, LIMITS, mode=ScalingMode.MANUAL, size=size)
    job.apply(set_workers(2))
    job.run(30.0)
    assert [node.config_resource for node in job.started.values()][-2:] == [size, size]


def test_what_is_refused() -> None:
    job = ScaledJob(scales_well, ResourceLimits(64, 1 << 18, max_workers=4))
    job.run(30.0)
    with pytest.raises(BadRequest, match="may have 1 to 4 workers, not 5"):
        job.apply(set_workers(5))
    with pytest.raises(BadRequest, match="A plan for 'ps'"):
        job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"ps": NodeGroupResource(1)})))
    with pytest.raises(BadRequest, match="A plan for 'worker-0'"):
        job.apply(ScaleNodes(JOB, "cli", ResourcePlan(node_resources={"worker-0": NodeResource(cpu=1)})))
    job.apply(ScaleTasks("with servers", "launcher", 1, 1))
    with pytest.raises(BadRequest, match="has parameter servers"):
        job.apply(StartScaling("with servers", "launcher", ScalingMode.SINGLE_JOB, LIMITS))
    job.end("worker-0", NodeExit.USER_ERROR, 1)
    with pytest.raises(Stale, match="is over"):
        job.apply(set_workers(2))
