"""Plans are compared with the speed before them: worse ones are rolled back once, others are kept."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.master.core.job_scaling.plan_verification import (
    RECENT,
    RECORDS,
    PlanHistory,
    PlanOutcome,
    composition,
    made,
    observed,
    refusal,
    superseded,
)
from dlrover_hooks.master.scaling import (
    JobSample,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeType,
    ResourcePlan,
)
from dlrover_hooks.protocol import ScalingPace
from tests.benchmarks.bench_scaling import rollback_right_pct

SIZE = NodeResource(cpu=4, memory=4096)
WINDOW_S = 30.0
PACE = ScalingPace()


def sample(workers: int, speed: float, *, servers: tuple[float, ...] = ()) -> JobSample:
    """Workers of one size, and servers with so many cores."""
    nodes = [NodeSample(f"worker-{n}", NodeType.WORKER, SIZE, 2.0, 1000) for n in range(workers)]
    nodes += [
        NodeSample(f"ps-{n}", NodeType.PS, NodeResource(cpu=cpu, memory=4096), cpu / 2, 1000)
        for n, cpu in enumerate(servers)
    ]
    return JobSample(speed, tuple(nodes))


def workers(count: int) -> ResourcePlan:
    return ResourcePlan({"worker": NodeGroupResource(count, SIZE)})


class Job:
    """A job and its clock: one window after the other."""

    def __init__(self) -> None:
        self.history, self.now = PlanHistory(), 0.0
        self.sample = sample(2, 1.0)
        self.rollbacks: list[ResourcePlan] = []

    def see(self, count: int, *speeds: float) -> None:
        for speed in speeds:
            self.measure(sample(count, speed))

    def measure(self, window: JobSample) -> None:
        self.now += WINDOW_S
        self.sample = window
        self.history, rollback = observed(self.history, self.sample, self.now)
        if not rollback.empty:
            self.rollbacks.append(rollback)

    def plan(self, plan: ResourcePlan, predicted: float | None = None) -> None:
        assert refusal(self.history, plan, self.sample, self.now) == ""
        self.history = made(self.history, plan, self.sample, self.now, reason="test", predicted=predicted)

    def settle(self, count: int, speed: float = 0.01) -> None:
        """Windows that do not count: the first with these nodes, and those of the settling time."""
        for _ in range(int(PACE.settle_s // WINDOW_S)):
            self.see(count, speed)

    @property
    def outcome(self) -> PlanOutcome:
        return self.history.records[-1].outcome


@pytest.fixture
def job() -> Job:
    """It runs with 2 workers at 10 steps per second."""
    job = Job()
    job.see(2, 9.0, 10.0, 11.0)
    return job


def test_a_plan_that_slows_the_job_is_taken_back_after_two_windows(job: Job) -> None:
    job.plan(workers(4))
    job.settle(4)
    job.see(4, 9.4)
    assert job.outcome is PlanOutcome.MEASURING
    job.see(4, 9.4)
    assert job.outcome is PlanOutcome.ROLLED_BACK
    assert job.rollbacks == [workers(2)]
    assert job.history.records[-1].decided == "10 steps/s before it, 9.4 in 2 windows after it"
    job.see(4, 9.4, 9.4)  # while the nodes are being stopped
    job.see(2, 10.0)
    assert job.rollbacks == [workers(2)]


def test_a_plan_that_costs_no_speed_is_kept(job: Job) -> None:
    job.plan(workers(4))
    job.settle(4)
    job.see(4, 9.6, 9.6)
    assert job.outcome is PlanOutcome.KEPT
    assert not job.rollbacks


def test_windows_before_the_job_settled_do_not_count(job: Job) -> None:
    job.plan(workers(4))
    job.see(2, 1.0)  # the nodes are started
    job.settle(4)
    assert job.history.records[-1].speeds == ()
    job.see(4, 20.0, 20.0)
    assert job.outcome is PlanOutcome.KEPT


@pytest.mark.parametrize(
    ("speeds", "outcome"), [((9.0, 9.8, 9.8), PlanOutcome.KEPT), ((9.8, 9.0, 9.0), PlanOutcome.ROLLED_BACK)]
)
def test_windows_that_differ_are_decided_by_two_alike(
    job: Job, speeds: tuple[float, ...], outcome: PlanOutcome
) -> None:
    job.plan(workers(4))
    job.settle(4)
    job.see(4, *speeds[:2])
    assert job.outcome is PlanOutcome.MEASURING
    job.see(4, speeds[2])
    assert job.outcome is outcome


@pytest.mark.parametrize(("slow", "outcome"), [(9.3, PlanOutcome.KEPT), (1.0, PlanOutcome.ROLLED_BACK)])
def test_after_six_windows_without_two_alike_the_median_decides(job: Job, slow: float, outcome: PlanOutcome) -> None:
    job.plan(workers(4))
    job.settle(4)
    job.see(4, *(9.9, slow) * 2, 9.9)
    assert job.outcome is PlanOutcome.MEASURING
    job.see(4, slow)
    assert job.outcome is outcome


def test_nodes_that_do_not_run_in_time_are_taken_back(job: Job) -> None:
    job.plan(workers(4))
    while job.now + WINDOW_S < PACE.start_s + 3 * WINDOW_S:
        job.see(3, 12.0)  # the fourth one hangs in Pending
    assert job.outcome is PlanOutcome.STARTING
    job.see(3, 12.0)
    assert job.outcome is PlanOutcome.ROLLED_BACK
    assert job.history.records[-1].decided == "its nodes did not all run within 900 s"
    assert job.rollbacks == [workers(2)]


def test_a_node_that_fails_starts_the_measurement_again(job: Job) -> None:
    job.plan(workers(4))
    job.settle(4)
    job.see(4, 9.0)
    job.see(3, 7.0)
    job.settle(4)
    job.see(4, 9.0)
    assert job.outcome is PlanOutcome.MEASURING
    assert job.history.records[-1].speeds == (9.0,)


def test_a_plan_for_fewer_nodes_is_held_to_its_prediction(job: Job) -> None:
    job.plan(workers(1), predicted=9.5)
    job.settle(1)
    job.see(1, 9.1, 9.1)
    assert job.outcome is PlanOutcome.KEPT


def test_a_prediction_that_was_too_high_is_no_reason_to_roll_back(job: Job) -> None:
    job.plan(workers(4), predicted=20.0)
    job.settle(4)
    job.see(4, 10.5, 10.5)
    assert job.outcome is PlanOutcome.KEPT
    record = job.history.records[-1]
    assert (record.before, record.predicted, record.measured) == (10.0, 20.0, 10.5)


def test_one_plan_at_a_time_and_none_before_the_job_was_measured(job: Job) -> None:
    fresh = Job()
    assert "was not measured" in refusal(fresh.history, workers(4), fresh.sample, 0.0)
    fresh.see(2, 10.0)
    assert "was not measured" in refusal(fresh.history, workers(4), fresh.sample, fresh.now)
    job.plan(workers(4))
    assert refusal(job.history, workers(8), job.sample, job.now) == "plan 1 is not verified yet"
    job.settle(4)
    job.see(4, 20.0, 20.0)
    assert "less than 300 s ago" in refusal(job.history, workers(8), job.sample, job.now)
    assert refusal(job.history, workers(8), job.sample, job.now + PACE.cool_down_s) == ""
    assert refusal(job.history, workers(4), job.sample, job.now + PACE.cool_down_s) == "it changes nothing"
    other = sample(5, 1.0)
    assert "was not measured" in refusal(job.history, workers(8), other, job.now + PACE.cool_down_s)


def test_what_was_rolled_back_is_barred_for_longer_each_time(job: Job) -> None:
    for times in range(3):
        job.plan(workers(4))
        job.settle(4)
        job.see(4, 1.0, 1.0)
        assert job.outcome is PlanOutcome.ROLLED_BACK
        decided = job.now
        job.see(2, 10.0, 10.0, 10.0)
        barred_s = PACE.barred_s * 2**times
        assert "was rolled back" in refusal(job.history, workers(4), job.sample, decided + barred_s - 1)
        assert refusal(job.history, workers(3), job.sample, decided + PACE.cool_down_s) == ""
        job.now = decided + barred_s
    assert len(job.history.barred) == 1
    assert [one.number for one in job.history.records] == [1, 2, 3]


def test_a_plan_that_cannot_wait_ends_the_measurement(job: Job) -> None:
    assert superseded(job.history, "nothing is open", job.now) == job.history
    job.plan(workers(4))
    job.history = superseded(job.history, "worker-1 was killed for memory", job.now)
    assert job.outcome is PlanOutcome.SUPERSEDED
    job.see(4, 1.0, 1.0, 1.0, 1.0)
    assert not job.rollbacks


def test_a_migrated_server_is_taken_back_by_its_group() -> None:
    """A server that was migrated has a new name; the sizes decide."""
    job = Job()
    for _ in range(3):
        job.measure(sample(2, 10.0, servers=(4.0, 4.0)))
    job.plan(ResourcePlan(node_resources={"ps-1": NodeResource(cpu=8, memory=4096)}))
    for speed in (0.01, 0.01, 9.0, 9.0):
        job.measure(sample(2, speed, servers=(8.0, 4.0)))
    assert job.rollbacks == [ResourcePlan({"ps": NodeGroupResource(2, SIZE)})]


def test_nodes_are_compared_by_type_and_size_in_any_order() -> None:
    mixed = sample(2, 1.0, servers=(8.0, 4.0))
    turned = JobSample(5.0, mixed.nodes[::-1])
    assert composition(mixed) == composition(turned)
    assert sum(one.count for one in composition(mixed)) == 4


def test_a_history_survives_as_json(job: Job) -> None:
    """The journal keeps it."""

    def again(history: PlanHistory) -> PlanHistory:
        return msgspec.json.decode(msgspec.json.encode(history), type=PlanHistory)

    assert again(PlanHistory()) == PlanHistory()
    job.plan(workers(4), predicted=11.0)
    job.settle(4)
    job.see(4, 1.0, 1.0)
    assert again(job.history) == job.history


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 20), st.integers(1, 4), st.booleans()), max_size=300))
def test_whatever_happens_each_plan_is_decided_once(
    steps: list[tuple[int, float, int, bool]],
) -> None:
    """One plan is open at most, one rollback belongs to each plan that is rolled back, and the history is bounded."""
    job = Job()
    for count, speed, wanted, urgent in steps:
        job.see(count, speed)
        if urgent and wanted == 1:
            job.history = superseded(job.history, "urgent", job.now)
        if not refusal(job.history, workers(wanted), job.sample, job.now):
            job.plan(workers(wanted))
        undecided = [one for one in job.history.records if one.outcome in (PlanOutcome.STARTING, PlanOutcome.MEASURING)]
        assert len(undecided) <= 1
        assert len(job.history.records) <= RECORDS
        assert len(job.history.speeds) <= RECENT
    undone = [one for one in job.history.records if one.outcome is PlanOutcome.ROLLED_BACK]
    assert [one.restores for one in undone] == job.rollbacks
    assert all(one.decided for one in job.history.records[:-1])


def test_noise_of_five_percent_hides_no_plan_that_is_ten_percent_worse() -> None:
    assert rollback_right_pct(range(5000, 5100)) >= 95
