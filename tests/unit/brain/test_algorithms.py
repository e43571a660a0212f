"""The built-in algorithms, and which one answers what."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.master.brain.algorithms.creation import first_plan, plan_from_history
from dlrover_hooks.master.brain.algorithms.parameter_servers import idle_ps, insufficient_ps, ps_initial, unbalanced_ps
from dlrover_hooks.master.brain.algorithms.registry import BUILT_IN, DEFAULTS, PlanProblem, problem
from dlrover_hooks.master.brain.algorithms.running import fitted_model, running
from dlrover_hooks.master.brain.algorithms.speeds import curve
from dlrover_hooks.master.brain.algorithms.workers import oom_worker, workers_initial
from dlrover_hooks.master.brain.database.events import EventKind
from dlrover_hooks.master.brain.database.jobs import usage_of
from dlrover_hooks.master.brain.records import (
    ActiveJob,
    ClusterView,
    JobRecord,
    PastJob,
    Proposal,
    SpeedPoint,
)
from dlrover_hooks.master.scaling import JobSample, NodeResource, NodeType, OptimizeStage, ResourceLimits
from dlrover_hooks.protocol import Node
from tests.brain_jobs import SIZE, sample, told

NOTHING = MappingProxyType({})
EMPTY = ClusterView()


def record(*samples: JobSample, ps: bool = True, oom: tuple[Node, ...] = (), age_s: float = 0.0, **more) -> JobRecord:
    return JobRecord(told(ps=ps, **more), OptimizeStage.RUNNING, samples, oom, age_s)


def past(*samples: JobSample, ps: bool = True, seconds: float = 10_000.0, speed: float = 10.0) -> PastJob:
    return PastJob(told(ps=ps), usage_of(samples), speed, seconds)


def counts(proposal: Proposal | None) -> dict[str, int]:
    assert proposal is not None
    return {name: group.count for name, group in proposal.plan.node_group_resources.items()}


def test_there_is_an_algorithm_for_each_problem() -> None:
    assert set(DEFAULTS) == set(PlanProblem)
    assert {name for names in DEFAULTS.values() for name in names} == set(BUILT_IN)


@pytest.mark.requirement("DL-101", "EZ-18")
def test_the_problem_of_servers_decides_the_algorithm() -> None:
    """Unbalanced workload and too few servers are different problems, by memory and by CPU."""
    killed = (Node(NodeType.PS, 0, SIZE),)
    uneven = JobSample(1.0, (sample(2, ps=1, ps_memory=8000).nodes[0], *sample(2, ps=3, ps_memory=2000).nodes[1:]))
    assert problem(EventKind.OUT_OF_MEMORY, record(uneven, oom=killed)) is PlanProblem.UNBALANCED_PS
    assert problem(EventKind.OUT_OF_MEMORY, record(sample(2, ps=3), oom=killed)) is PlanProblem.INSUFFICIENT_PS
    assert problem(EventKind.HOT_PS, record(sample(2, ps_cpu=[3.9, 1.0]))) is PlanProblem.UNBALANCED_PS
    assert problem(EventKind.HOT_PS, record(sample(2, ps_cpu=[3.9, 3.8]))) is PlanProblem.INSUFFICIENT_PS


def test_other_events_have_one_problem_each() -> None:
    worker = record(sample(2), oom=(Node(NodeType.WORKER, 0, SIZE),))
    assert problem(EventKind.OUT_OF_MEMORY, worker) is PlanProblem.OOM_WORKER
    found = {kind: problem(kind, record()) for kind in EventKind if kind is not EventKind.OUT_OF_MEMORY}
    assert found[EventKind.INIT] is PlanProblem.CREATION
    assert found[EventKind.LOW_USE] is PlanProblem.IDLE_PS
    assert found[EventKind.SLOW] is found[EventKind.PERIODIC] is PlanProblem.RUNNING


def test_a_job_like_none_gets_a_share_of_its_limits() -> None:
    assert counts(first_plan(record(), (), EMPTY, NOTHING)) == {"ps": 1, "worker": 1}
    assert plan_from_history(record(), (), EMPTY, NOTHING) is None
    assert plan_from_history(record(), (past(sample(2), ps=False),), EMPTY, NOTHING) is None, "it had no servers"


def test_a_plan_from_history_has_what_such_jobs_used() -> None:
    """Busiest server 3 cores + 0.5; 1.5 * 8 cores in total need 4 of them; 1.2 and 1.6 times the memory."""
    before = past(*[sample(5, ps_cpu=[3.0, 3.0, 2.0], ps_memory=3000, worker_cpu=1.5, worker_memory=2000)] * 3)
    proposal = plan_from_history(record(), (before,), EMPTY, NOTHING)
    assert counts(proposal) == {"ps": 4, "worker": 5}
    assert proposal is not None
    assert proposal.predicted == 10.0
    groups = proposal.plan.node_group_resources
    assert (groups["ps"].node_resource.cpu, groups["ps"].node_resource.memory) == (3.5, 3600)
    assert (groups["worker"].node_resource.cpu, groups["worker"].node_resource.memory) == (1.5, 3200)


@given(
    cpu=st.floats(1, 200), memory=st.integers(1024, 200_000), workers=st.integers(1, 40), servers=st.integers(0, 6),
    used=st.floats(0.1, 40), mib=st.integers(1, 70_000), least=st.integers(1, 4),
)  # fmt: skip
def test_a_plan_from_history_fits_the_limits(
    cpu: float, memory: int, workers: int, servers: int, used: float, mib: int, least: int
) -> None:
    if least > cpu or least * 1024 > memory:
        return
    limits = ResourceLimits(cpu, memory, min_workers=least, max_workers=32, max_ps=4)
    before = past(sample(workers, ps_cpu=[used] * servers, ps_memory=mib, worker_cpu=used, worker_memory=mib))
    job = record(ps=bool(servers), limits=limits)
    for proposal in (plan_from_history(job, (before,), EMPTY, NOTHING), first_plan(job, (), EMPTY, NOTHING)):
        if proposal is None:
            continue
        groups = proposal.plan.node_group_resources
        assert sum(group.count * group.node_resource.cpu for group in groups.values()) <= limits.cpu + 1e-6
        assert sum(group.count * group.node_resource.memory for group in groups.values()) <= limits.memory
        assert least <= groups["worker"].count <= 32
        assert (groups["ps"].count if servers else 0) <= 4


def test_workers_get_what_they_use_and_what_finished_jobs_needed() -> None:
    job = record(*[sample(3, worker_cpu=1.25, worker_memory=2000)] * 3, ps=False)
    proposal = workers_initial(job, (), EMPTY, NOTHING)
    assert proposal is not None
    assert proposal.plan.node_group_resources["worker"].node_resource == NodeResource(cpu=1.2, memory=3000)
    larger = workers_initial(job, (past(sample(1, worker_memory=5000)),), EMPTY, NOTHING)
    assert larger is not None
    assert larger.plan.node_group_resources["worker"].node_resource.memory == 8000
    assert workers_initial(record(ps=False), (), EMPTY, NOTHING) is None


def test_a_worker_that_was_killed_for_memory_gets_more() -> None:
    killed = (Node(NodeType.WORKER, 0, NodeResource(cpu=2, memory=3000)),)
    proposal = oom_worker(record(*[sample(3)] * 3, oom=killed), (), EMPTY, NOTHING)
    assert counts(proposal) == {"worker": 3}
    assert proposal is not None
    assert proposal.plan.node_group_resources["worker"].node_resource.memory == 6000
    like = past(sample(1, worker_memory=10_000))
    more = oom_worker(record(oom=killed), (like,), EMPTY, NOTHING)
    assert more is not None
    assert more.plan.node_group_resources["worker"].node_resource.memory == 16_000
    most = (Node(NodeType.WORKER, 0, NodeResource(cpu=2, memory=65536)),)
    assert oom_worker(record(oom=most), (), EMPTY, NOTHING) is None


def test_unbalanced_servers_get_more_and_too_few_become_more() -> None:
    killed = (Node(NodeType.PS, 0, SIZE), Node(NodeType.WORKER, 1, SIZE))
    job = record(*[sample(4, ps=2)] * 3, oom=killed)
    uneven = unbalanced_ps(job, (), EMPTY, NOTHING)
    assert uneven is not None
    assert uneven.plan.node_resources["ps-0"].memory == 2 * SIZE.memory
    assert counts(uneven) == {"worker": 4}, "the worker that was killed with it gets more, too"
    assert counts(insufficient_ps(job, (), EMPTY, NOTHING)) == {"ps": 4, "worker": 4}


def test_hot_servers_that_are_all_busy_become_more_until_the_limit() -> None:
    busy = [sample(4, ps_cpu=[3.9, 3.8])] * 3
    assert counts(insufficient_ps(record(*busy), (), EMPTY, NOTHING)) == {"ps": 4}
    least = ResourceLimits(cpu=128, memory=512 * 1024, max_ps=2)
    proposal = insufficient_ps(record(*busy, limits=least), (), EMPTY, NOTHING)
    assert proposal is not None
    assert not proposal.plan.node_group_resources
    assert set(proposal.plan.node_resources) == {"ps-0", "ps-1"}, "more cores instead"


def test_servers_for_the_workers_that_fit_until_the_busiest_is_exhausted() -> None:
    even = ps_initial(record(*[sample(2, ps_cpu=[2.0, 2.0])] * 3), (), EMPTY, NOTHING)
    skewed = ps_initial(record(*[sample(2, ps_cpu=[3.6, 0.4])] * 3), (), EMPTY, NOTHING)
    assert counts(even)["ps"] > counts(skewed)["ps"], "the same cores, but more workers would not be served"


def test_idle_servers_lose_cores_only_if_the_job_goes_on() -> None:
    idle = [sample(2, ps_cpu=[0.5, 1.4])] * 3
    like = past(*idle, seconds=10_000)
    proposal = idle_ps(record(*idle, age_s=100), (like,), EMPTY, NOTHING)
    assert proposal is not None
    assert {name: size.cpu for name, size in proposal.plan.node_resources.items()} == {"ps-0": 1, "ps-1": 2}
    assert idle_ps(record(*idle, age_s=7000), (like,), EMPTY, NOTHING) is None
    assert idle_ps(record(*idle), (), EMPTY, NOTHING) is None


def scaled(workers: int) -> JobSample:
    """An all-reduce job whose step has a fixed part: 4 workers bring less than 4 times the speed."""
    return sample(workers, speed=1 / (0.1 + 0.9 / workers))


def test_a_running_job_grows_by_its_own_measurements_while_the_cluster_is_free() -> None:
    job = record(*[scaled(1)] * 3, ps=False, global_batch=256)
    assert counts(running(job, (), EMPTY, NOTHING)) == {"worker": 2}
    known = record(scaled(1), scaled(2), scaled(4), ps=False, global_batch=256)
    proposal = running(known, (), EMPTY, NOTHING)
    assert counts(proposal) == {"worker": 8}
    assert proposal is not None
    assert proposal.predicted == pytest.approx(1 / (0.1 + 0.9 / 8), rel=0.3)
    assert proposal.curve
    assert proposal.curve[-1].workers == 8
    assert counts(fitted_model(known, (), EMPTY, NOTHING)) == {"worker": 8}
    assert fitted_model(job, (), EMPTY, NOTHING) == Proposal(
        proposal.plan.__class__(), "by the model no other configuration pays"
    )


def other_job(name: str, now: int, *, tenant: str = "", points: int = 8) -> ActiveJob:
    speeds = [SpeedPoint(4 * n, 0, n, 1 / (0.1 + 0.9 / n)) for n in range(1, points + 1)]
    return ActiveJob(name, "cpu", 4 * now, tuple(speeds), tenant, age_s=1000.0)


def test_where_jobs_want_more_than_there_is_each_gets_its_share() -> None:
    """24 cores, 4 for each worker: of two equal jobs none keeps 5 workers while the other one has 1.

    A job at most doubles in one round, so the other one is given 2 workers first, and then 3.
    """
    known = record(scaled(1), scaled(2), scaled(4), scaled(5), ps=False, global_batch=256, age_s=1000.0)
    for others, share in ((1, 4), (2, 3)):
        crowded = ClusterView({"cpu": 24}, (other_job("other", others),))
        assert counts(running(known, (), crowded, NOTHING)) == {"worker": share}
    alone = ClusterView({"cpu": 24}, (other_job("other", 1, points=1),))
    assert "share" not in str(running(record(scaled(1), ps=False), (), alone, NOTHING))


def test_a_job_does_not_take_what_another_one_still_has() -> None:
    known = record(scaled(4), scaled(2), scaled(1), ps=False, global_batch=256, age_s=1000.0)
    proposal = running(known, (), ClusterView({"cpu": 24}, (other_job("other", 5),)), NOTHING)
    assert proposal is not None
    assert proposal.plan.empty
    assert "what it has" in proposal.reason


def test_a_tenant_gets_no_more_than_its_quota() -> None:
    known = record(scaled(1), scaled(2), scaled(4), ps=False, global_batch=256, tenant="a", age_s=1000.0)
    view = ClusterView({"cpu": 400}, (other_job("other", 1, tenant="a", points=1),), {"a": 12})
    assert counts(running(known, (), view, NOTHING)) == {"worker": 2}


def test_a_curve_ends_where_more_does_not_pay() -> None:
    speeds = {(n,): min(n, 4.0) for n in range(1, 20)}
    found = curve(sample(1), speeds)
    assert [(one.workers, one.units) for one in found] == [(1, 4), (2, 8), (3, 12), (4, 16)]
    long = curve(sample(1), {(n,): float(n) for n in range(1, 400)})
    assert len(long) <= 13
    assert min(one.workers for one in long) == 1
    assert max(one.speed for one in long) >= 0.95 * 399
    assert curve(sample(1), {}) == ()


@given(st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 30)), st.floats(0, 1e6), max_size=60))
def test_a_curve_rises(speeds: dict[tuple[int, int], float]) -> None:
    found = curve(sample(1, ps=1), dict(speeds))
    assert list(found) == sorted(found, key=lambda one: (one.units, one.speed))
    assert all(a.units < b.units and a.speed < b.speed for a, b in itertools.pairwise(found))
    assert bool(found) == any(speed > 0 for speed in speeds.values())
