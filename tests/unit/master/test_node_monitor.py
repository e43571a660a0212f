"""What the samples of a job are made of. The job is one of the simulation; only heartbeats and reports matter here."""

from __future__ import annotations

import pytest

from dlrover_hooks.master.core import heartbeats, node_vitals
from dlrover_hooks.master.core.job_scaling.node_monitor import NO_STEP, NodeMonitor
from dlrover_hooks.master.core.ps_clusters.cluster_state import live_chief
from dlrover_hooks.protocol import (
    JobSample,
    NodeGroupResource,
    NodeType,
    NodeVitals,
    ResourceLimits,
    ResourcePlan,
    ScaleNodes,
    ScalingMode,
)
from dlrover_hooks.protocol.vitals_messages import CPUVitals, MemoryVitals, NetworkVitals, WorkerProcesses
from tests.simulation.scaled_job import JOB, MIB
from tests.simulation.scaled_ps_job import ScaledPSJob

USAGE = CPUVitals(8, 1.0, (1.0, 1.0, 1.0)), MemoryVitals(1 << 34, 1 << 33), NetworkVitals(0.0, 0.0)


class Measured:
    """A parameter server job that runs, and a monitor of it. Time passes as `beat` and `report` say."""

    def __init__(self) -> None:
        self.job = ScaledPSJob(ResourceLimits(32, 1 << 17), mode=ScalingMode.MANUAL)
        self.job.run(60.0)
        self.now, self.monitor = self.job.now, NodeMonitor()
        self.step = int(self.job.steps)
        assert self.sample() is None  # the first window begins

    def sample(self) -> JobSample | None:
        return self.monitor.sample(self.job.nodes, self.job.state.jobs[JOB], self.job.scaling)

    def beat(self, steps: int) -> None:
        chief = live_chief(self.job.clusters)
        assert chief is not None
        self.step += steps
        heartbeats.beat(self.job.nodes, (JOB, chief.incarnation), self.now, step=self.step)

    def report(self, cpu_percent: float, memory: int, *, after_s: float = 5.0) -> None:
        """Of all tasks, which have used so much since the last one."""
        self.now += after_s
        names = [task.incarnation for kind in (NodeType.PS, NodeType.WORKER) for task in self.job.running(kind)]
        trees = tuple(WorkerProcesses(name, 1, cpu_percent, memory * MIB) for name in names)
        node_vitals.keep(self.job.nodes, NodeVitals(JOB, "launcher", "here", *USAGE, workers=trees), self.now)


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_cores_are_the_mean_and_memory_the_highest_of_the_window(measured: Measured) -> None:
    measured.report(100.0, 900)
    measured.report(300.0, 700)
    measured.beat(20)
    sample = measured.sample()
    assert sample is not None
    assert [(node.name, node.type) for node in sample.nodes] == [("ps:0", NodeType.PS), ("worker:0", NodeType.WORKER)]
    assert [node.cpu for node in sample.nodes] == pytest.approx([2.0, 2.0])
    assert [node.memory for node in sample.nodes] == [2400, 900]  # the server had more before
    assert sample.speed == pytest.approx(2.0, rel=0.2)
    measured.report(50.0, 700)
    measured.beat(10)
    sample = measured.sample()
    assert sample is not None
    assert [node.cpu for node in sample.nodes] == pytest.approx([0.5, 0.5])


def test_a_window_goes_on_until_each_node_has_reported_and_a_step_was_made(measured: Measured) -> None:
    measured.now += 3.0
    measured.beat(6)
    assert measured.sample() is None
    measured.report(100.0, 500, after_s=2.0)
    sample = measured.sample()
    assert sample is not None
    assert sample.speed == pytest.approx(2.0, rel=0.4)
    measured.report(100.0, 500)
    assert measured.sample() is None, "no step since: it may be a long one"
    measured.now += 30.0
    measured.beat(1)
    measured.report(100.0, 500)
    sample = measured.sample()
    assert sample is not None
    assert sample.speed == pytest.approx(1 / 35.0, rel=0.1)


def test_a_job_that_stands_still_has_the_speed_0(measured: Measured) -> None:
    window_s, seen = measured.job.scaling.history.pace.window_s, list[JobSample | None]()
    for _ in range(NO_STEP):
        measured.report(1.0, 500, after_s=window_s)
        seen.append(measured.sample())
    *waiting, last = seen
    assert waiting == [None] * (NO_STEP - 1)
    assert last is not None
    assert last.speed == 0.0


def test_nothing_is_measured_across_a_change_of_the_tasks(measured: Measured) -> None:
    measured.report(100.0, 500)
    measured.beat(10)
    job = measured.job
    job.apply(ScaleNodes(JOB, "cli", ResourcePlan({"ps": NodeGroupResource(2)})))
    job.run(60.0)
    assert measured.sample() is None
    job.run(5.0)
    sample = measured.sample()
    assert sample is not None
    assert len(sample.of(NodeType.PS)) == 2


def test_another_process_in_a_tasks_place_is_another_node(measured: Measured) -> None:
    measured.report(100.0, 500)
    measured.beat(10)
    (server,) = measured.job.running(NodeType.PS)
    measured.job.kill(server.id)
    measured.job.run(60.0)
    assert measured.sample() is None
