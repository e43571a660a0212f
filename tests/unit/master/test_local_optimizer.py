"""Plans for a single job: the rules, then the fitted models."""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.scaling import (
    JobSample,
    LocalOptimizer,
    Node,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeType,
    OptimizeStage,
    ResourceLimits,
    ResourceOptimizer,
    ResourcePlan,
)
from dlrover_hooks.master.scaling.speed_models import AllReduceModel, PsSpeedModel, fit_ps_speed
from tests.benchmarks.bench_scaling import goodput_error
from tests.benchmarks.scaling_jobs import ps_job, scaled

LIMITS = ResourceLimits(cpu=100, memory=100 * 1024)
PS_SIZE, WORKER_SIZE = NodeResource(cpu=4, memory=4096), NodeResource(cpu=8, memory=8192)
OOM = OptimizeStage.RUNNING


def seen(
    ps: list[float], workers: int, *, speed: float = 1.0, memory: list[int] | None = None, size: NodeResource = PS_SIZE
) -> JobSample:
    """Servers that use so many cores each; workers that use 2 cores and 1000 MiB."""
    used = zip(ps, memory or [2000] * len(ps), strict=True)
    servers = [NodeSample(f"ps-{n}", NodeType.PS, size, cpu, mib) for n, (cpu, mib) in enumerate(used)]
    others = [NodeSample(f"worker-{n}", NodeType.WORKER, WORKER_SIZE, 2, 1000) for n in range(workers)]
    return JobSample(speed, (*servers, *others))


def optimizer(*samples: JobSample, ps: bool = True) -> LocalOptimizer:
    made = LocalOptimizer(LIMITS, ps=ps)
    for sample in samples:
        made.observe(sample)
    return made


@pytest.mark.requirement("SC-17", "SC-18", "SC-19", "SC-20")
def test_the_interface_is_abstract_and_its_config_cannot_leak() -> None:
    """DLRover's optimizers have a mutable default, which carries the phase from call to call."""
    methods = {
        "generate_opt_plan": ["self", "stage", "config"],
        "generate_oom_recovery_plan": ["self", "oom_nodes", "stage", "config"],
        "generate_resource_plan_with_optimizer": ["self", "config"],
    }
    assert set(ResourceOptimizer.__abstractmethods__) == set(methods)
    for owner in (ResourceOptimizer, LocalOptimizer):
        for name, arguments in methods.items():
            parameters = inspect.signature(getattr(owner, name)).parameters
            assert list(parameters) == arguments
            default = parameters["config"].default
            assert default == {}
            with pytest.raises(TypeError):
                default["phase"] = 1
    with pytest.raises(TypeError, match="abstract"):
        ResourceOptimizer()  # pyright: ignore[reportAbstractUsage]


def test_first_plan() -> None:
    plan = LocalOptimizer(ResourceLimits(cpu=11, memory=20480), ps=True).generate_opt_plan(OptimizeStage.CREATE)
    one = NodeGroupResource(1, NodeResource(cpu=3, memory=4096))
    assert plan.node_group_resources == {"ps": one, "worker": one}
    large = LocalOptimizer(ResourceLimits(cpu=1000, memory=10**6)).generate_opt_plan(OptimizeStage.CREATE)
    assert large.node_group_resources == {"worker": NodeGroupResource(1, NodeResource(cpu=16, memory=8192))}


def test_the_first_plan_is_within_the_limits() -> None:
    limits = ResourceLimits(cpu=8, memory=8192, min_workers=8)
    (group,) = LocalOptimizer(limits).generate_opt_plan(OptimizeStage.CREATE).node_group_resources.values()
    assert group.count * group.node_resource.cpu <= 8
    assert group.count * group.node_resource.memory <= 8192


def test_servers_are_planned_with_the_configuration_of_servers() -> None:
    """DLRover's `get_config_resource` gives them that of the workers.

    Two servers use 3 cores for 2 workers: 1.5 per worker. 100 / (1.5 + 2) workers fit; their servers need 42.9 cores.
    """
    plan = optimizer(seen([1.5, 1.5], 2)).generate_opt_plan(OptimizeStage.PS_INITIAL)
    assert plan.node_group_resources == {"ps": NodeGroupResource(11, NodeResource(cpu=4, memory=4096 - 1696))}


def test_workers_get_what_they_use() -> None:
    plan = optimizer(seen([1.0], 3)).generate_opt_plan(OptimizeStage.WORKER_INITIAL)
    assert plan.node_group_resources == {"worker": NodeGroupResource(3, NodeResource(cpu=2, memory=1500))}


def test_a_hot_server_gets_more_cores_and_so_do_the_others() -> None:
    """One is hot; 100 - 2 * 8 cores are left for both, which use 3.6 and 3.4."""
    plan = optimizer(*[seen([3.6, 3.4], 2)] * 2).generate_opt_plan(OptimizeStage.RUNNING)
    assert plan.node_group_resources == {}
    cores = {name: resource.cpu for name, resource in plan.node_resources.items()}
    assert cores["ps-0"] == pytest.approx(32, abs=0.11)
    assert cores["ps-1"] == pytest.approx(32 * 3.4 / 3.6, abs=0.11)
    plan.check(["ps-0", "ps-1"])


def test_a_server_that_was_hot_in_one_window_of_many_is_not() -> None:
    plan = optimizer(seen([3.9], 2), *[seen([1.0], 2)] * 3).generate_opt_plan(OptimizeStage.RUNNING)
    assert plan.node_resources == {}


def test_use_of_an_older_configuration_is_forgotten() -> None:
    plan = optimizer(*[seen([4.0], 2)] * 4, seen([1.0, 1.0], 2)).generate_opt_plan(OptimizeStage.RUNNING)
    assert plan.node_resources == {}


@pytest.mark.parametrize(
    ("why", "sample", "size", "ps", "single"),
    [
        ("one of them holds too much", seen([1, 1], 2, memory=[4096, 1000]), PS_SIZE, None, 8192),
        ("all are full", seen([1, 1], 2, memory=[4096, 4000]), PS_SIZE, 4, None),
        ("at most 8 GiB are added", seen([1], 2), NodeResource(4, 20480), None, 28672),
        ("it has the most already", seen([1], 2), NodeResource(4, 65536), 2, None),
        ("nothing was measured", None, PS_SIZE, None, 8192),
    ],
)
def test_a_server_killed_for_memory(
    why: str, sample: JobSample | None, size: NodeResource, ps: int | None, single: int | None
) -> None:
    made = optimizer(*([sample] if sample else []))
    plan = made.generate_oom_recovery_plan([Node(NodeType.PS, 0, size)], OOM)
    groups = {name: group.count for name, group in plan.node_group_resources.items()}
    assert groups == ({"ps": ps} if ps else {}), why
    assert {name: one.memory for name, one in plan.node_resources.items()} == ({"ps-0": single} if single else {}), why


def test_a_worker_killed_for_memory() -> None:
    plan = optimizer(seen([1], 3)).generate_oom_recovery_plan([Node(NodeType.WORKER, 1, WORKER_SIZE)], OOM)
    assert plan.node_group_resources == {"worker": NodeGroupResource(3, NodeResource(cpu=8, memory=16384))}
    most = Node(NodeType.WORKER, 1, NodeResource(8, 65536))
    assert optimizer(seen([1], 3)).generate_oom_recovery_plan([most], OOM) == ResourcePlan()


@pytest.mark.requirement("SC-22")
def test_a_job_is_scaled_to_what_pays_from_its_own_statistics() -> None:
    """Single-Job Mode: from one server and one worker, 5 % noise. The full figure: `make bench-scaling`."""
    found = [scaled(ps_job(seed), seed, 0.05) for seed in range(1000, 1012)]
    assert statistics.median(loss for loss, _ in found) <= 11
    assert max(plans for _, plans in found) <= 14, "it keeps changing the job"


def test_the_first_model_waits_for_enough_configurations() -> None:
    made = optimizer(seen([1], 1, speed=1))
    assert made.predicted is None
    assert made.generate_resource_plan_with_optimizer() == ResourcePlan()
    assert made.generate_opt_plan(OptimizeStage.RUNNING).node_group_resources == {
        "worker": NodeGroupResource(2, WORKER_SIZE)
    }


def test_no_plan_exceeds_the_limits_or_twice_what_was_measured() -> None:
    limits = ResourceLimits(cpu=40, memory=10**6, max_workers=4)
    made = LocalOptimizer(limits, ps=True)
    for ps, workers in ((1, 1), (1, 2), (2, 2), (2, 4)):
        made.observe(seen([1] * ps, workers, speed=workers))
        plan = made.generate_opt_plan(OptimizeStage.RUNNING)
        counts = {name: group.count for name, group in plan.node_group_resources.items()}
        assert counts.get("worker", workers) <= min(4, 2 * workers)
        assert 4 * counts.get("ps", ps) + 8 * counts.get("worker", workers) <= 40


def test_exhausted_servers_get_no_more_workers() -> None:
    """Hot, but no core is left to migrate them to, nor for another server: fewer workers are tried."""
    plan = optimizer(seen([4.0], 12)).generate_opt_plan(OptimizeStage.RUNNING)
    assert plan == ResourcePlan({"worker": NodeGroupResource(11, WORKER_SIZE)})


def test_speeds_of_nodes_of_another_size_are_forgotten() -> None:
    made = optimizer(*(seen([1] * ps, workers, speed=workers) for ps, workers in ((1, 1), (1, 2), (2, 2), (2, 4))))
    assert made.predicted is not None
    made.observe(seen([1, 1], 4, speed=5, size=NodeResource(cpu=8, memory=4096)))
    assert made.predicted is None


def test_an_all_reduce_job_grows_while_it_pays_and_shrinks_where_it_does_not() -> None:
    truth = AllReduceModel((0.01, 0.02), (0.05, 0.02), (0.01, 0.001), 1.0)
    counts = [_all_reduce(truth, start) for start in (1, 30)]
    speeds = {workers: 1 / _seconds(truth, workers) for workers in range(1, 33)}
    for count in counts:
        assert speeds[count] >= 0.9 * max(speeds.values())


def _seconds(truth: AllReduceModel, workers: int) -> float:
    return float(truth.seconds(workers, -(-workers // 4), 64 / workers))


def _all_reduce(truth: AllReduceModel, workers: int) -> int:
    limits = ResourceLimits(cpu=32 * 8, memory=10**6, max_workers=32)
    made = LocalOptimizer(limits, global_batch=64, workers_per_host=4)
    for _ in range(20):
        made.observe(seen([], workers, speed=1 / _seconds(truth, workers)))
        plan = made.generate_opt_plan(OptimizeStage.RUNNING)
        workers = plan.node_group_resources.get("worker", NodeGroupResource(workers)).count
    return workers


def test_models_are_fitted_from_noisy_steps() -> None:
    assert statistics.median(goodput_error(seed) for seed in range(1000, 1016)) <= 4
    exact = ps_job(3)
    where = [(1, 1), (1, 4), (2, 8), (3, 2), (3, 8)]
    fitted = fit_ps_speed([(*one, float(exact.speed(*one))) for one in where])
    assert fitted.speed(8, 24) == pytest.approx(float(exact.speed(8, 24)), rel=1e-3)
    assert PsSpeedModel((0.0, 0.0, 0.0, 0.0)).speed(1, 1) > 0


def test_samples_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="its speed is nan"):
        JobSample(float("nan"), ())
    with pytest.raises(UsageError, match="a sample needs parameter servers and workers"):
        optimizer(seen([], 2))
    with pytest.raises(UsageError, match="global_batch 0"):
        LocalOptimizer(LIMITS, global_batch=0)


def test_scipy_is_imported_at_the_first_fit_and_named_if_it_is_missing() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "from dlrover_hooks.errors import MissingExtra\n"
        "from dlrover_hooks.master.scaling.speed_models import fit_ps_speed\n"
        "try: fit_ps_speed([(1, 1, 1.0)])\n"
        "except MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "dlrover-hooks[scaling]" in done.stdout
