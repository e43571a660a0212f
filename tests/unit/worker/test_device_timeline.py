"""Parts of steps on a device that works behind the Python code."""

from __future__ import annotations

import pytest

from dlrover_hooks.worker.device_timeline import MOST_MARKS, MOST_PENDING, DeviceTimeline
from dlrover_hooks.worker.step_clock import WINDOW_STEPS, StepClock
from tests.simulated_gpu import SimulatedClock, SimulatedGpu


def make_steps(clock: StepClock, gpu: SimulatedGpu, steps: int, *, load_s: float = 0.01, late_s: float = 0.0) -> None:
    """Steps of a rank. The gradients are reduced `late_s` after the rank has computed its own."""
    for _ in range(steps):
        clock.boundary()
        clock.saved()
        gpu.clock.now += load_s
        clock.fetched()
        gpu.launch(0.05)
        clock.forward_ended()
        gpu.launch(0.1)
        clock.backward_ended()
        gpu.wait_until(gpu.free_at + late_s)
        clock.optimizing()
        gpu.launch(0.02)
        clock.stepped()
    clock.boundary()


@pytest.mark.parametrize(("load_s", "data_s"), [(0.01, 0.0), (0.3, 0.09)])
def test_the_phases_are_those_of_the_device(load_s: float, data_s: float) -> None:
    """Python queues a step in no time. Data costs what the device waits for it: nothing, if Python is ahead."""
    gpu = SimulatedGpu(SimulatedClock())
    clock = StepClock(gpu.clock)
    clock.measure_on_device(gpu)
    clock.window(0, 0.0)
    make_steps(clock, gpu, WINDOW_STEPS + 10, load_s=load_s, late_s=0.04)
    gpu.synchronize()
    make_steps(clock, gpu, 1, load_s=load_s)
    found = clock.window(WINDOW_STEPS, 100.0)
    assert found is not None
    assert found.steps >= WINDOW_STEPS
    assert (found.forward_s, found.backward_s) == pytest.approx((0.05, 0.1))
    assert (found.compute_s, found.optimizer_s) == pytest.approx((0.15, 0.02))
    assert found.network_s == pytest.approx(0.04)
    assert found.data_s == pytest.approx(data_s)
    assert gpu.released > 0


def test_a_step_that_is_captured_as_a_graph_is_not_measured() -> None:
    gpu = SimulatedGpu(SimulatedClock())
    clock = StepClock(gpu.clock)
    clock.measure_on_device(gpu)
    clock.window(0, 0.0)
    make_steps(clock, gpu, WINDOW_STEPS)
    gpu.capturing = True
    make_steps(clock, gpu, 3)
    gpu.capturing = False
    make_steps(clock, gpu, 5)
    gpu.synchronize()
    make_steps(clock, gpu, 1)
    found = clock.window(0, 100.0)
    assert found is not None
    assert found.steps == WINDOW_STEPS - 1 + 4, "without the first step, those of the graph, and the one after them"


def test_steps_of_a_device_that_falls_behind_are_dropped() -> None:
    """Such as one that waits for a lost rank: the marks of its steps do not add up."""
    gpu = SimulatedGpu(SimulatedClock())
    timeline = DeviceTimeline[int](gpu, 1)
    for step in range(3 * MOST_PENDING):
        gpu.free_at += 1.0
        timeline.mark(0)
        timeline.end_step(step, True)
    gpu.clock.now = gpu.free_at
    assert [step for _, step in timeline.measured()] == list(range(2 * MOST_PENDING, 3 * MOST_PENDING))


def test_a_step_without_an_end_takes_no_memory() -> None:
    gpu = SimulatedGpu(SimulatedClock())
    timeline = DeviceTimeline[int](gpu, 1)
    for _ in range(3 * MOST_MARKS):
        timeline.mark(0)
    assert len(timeline._ends) <= MOST_MARKS
    for step in range(2):
        timeline.mark(0)
        timeline.end_step(step, True)
    assert [step for _, step in timeline.measured()] == [1]


def test_a_forward_pass_outside_of_a_step_does_not_count() -> None:
    """Such as one of an evaluation, after the optimizer's step."""
    now = SimulatedClock()
    clock = StepClock(now)
    clock.window(0, 0.0)
    for _ in range(WINDOW_STEPS + 2):
        clock.boundary()
        clock.fetched()
        now.now += 1.0
        clock.forward_ended()
        now.now += 2.0
        clock.optimizing()
        clock.stepped()
        now.now += 5.0
        clock.forward_ended()
    clock.boundary()
    found = clock.window(0, 100.0)
    assert found is not None
    assert (found.forward_s, found.backward_s, found.compute_s, found.network_s) == (1.0, 2.0, 3.0, None)
