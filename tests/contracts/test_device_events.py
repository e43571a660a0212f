"""What `StepClock` expects of marks in a device's queue: of the simulated GPU, and of CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from dlrover_hooks.pytorch.step_phases import CudaEvents
from dlrover_hooks.worker.device_timeline import DeviceEvents, DeviceTimeline
from tests.simulated_gpu import SimulatedClock, SimulatedGpu

BUSY_S = 0.2


class Device(NamedTuple):
    events: DeviceEvents
    work: Callable[[], object]
    """Queue work of about `BUSY_S`."""
    finish: Callable[[], object]
    """Wait for all of it."""
    around_capture: Callable[[Callable[[], Any]], Any]
    """The result of a call while the work of this thread becomes a graph instead of being done."""


def simulated() -> Device:
    gpu = SimulatedGpu(SimulatedClock())

    def captured(call: Callable[[], Any]) -> Any:
        gpu.capturing = True
        try:
            return call()
        finally:
            gpu.capturing = False

    return Device(gpu, lambda: gpu.launch(BUSY_S), gpu.synchronize, captured)


def cuda() -> Device:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    hertz = 1e3 * torch.cuda.clock_rate()  # of MHz: cycles in a millisecond

    def captured(call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            found.append(call())
        return found[0]

    return Device(
        CudaEvents(device), lambda: torch.cuda._sleep(int(1e3 * BUSY_S * hertz)), torch.cuda.synchronize, captured
    )


@pytest.fixture(params=["simulated"] + ["cuda"] * torch.cuda.is_available())
def device(request: pytest.FixtureRequest) -> Device:
    return {"simulated": simulated, "cuda": cuda}[request.param]()


def test_a_mark_is_reached_after_the_work_before_it(device: Device) -> None:
    first = device.events.record()
    device.work()
    second = device.events.record()
    assert not device.events.reached(second), "Python does not wait for the work"
    device.finish()
    assert device.events.reached(first)
    assert device.events.reached(second)
    assert device.events.seconds(first, second) == pytest.approx(BUSY_S, rel=0.7)
    device.events.release([first, second])
    again = device.events.record()
    device.finish()
    assert device.events.reached(again)


def test_a_mark_is_no_part_of_a_graph(device: Device) -> None:
    assert device.around_capture(device.events.record) is None


def test_parts_of_a_step_have_the_time_of_the_device(device: Device) -> None:
    timeline = DeviceTimeline[str](device.events, 2)
    for step in ("one", "two"):
        timeline.mark(0)
        device.work()
        timeline.mark(1)
        timeline.end_step(step, True)
    assert list(timeline.measured()) == [], "the device has not finished them"
    device.finish()
    measured = dict((step, seconds) for seconds, step in timeline.measured())
    assert list(measured) == ["one", "two"]
    assert [seconds[1] for seconds in measured.values()] == pytest.approx([BUSY_S] * 2, rel=0.7)
    assert measured["two"][0] < 0.1 * BUSY_S
