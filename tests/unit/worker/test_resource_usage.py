"""What a heartbeat carries of its process."""

from __future__ import annotations

from collections.abc import Iterator

import pynvml
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.testing.nvml_fake import GPUFake, driver
from dlrover_hooks.worker import resource_usage
from dlrover_hooks.worker.resource_usage import Sampler
from tests.waiting import until


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sampler]:
    """One that has new vitals at each call."""
    monkeypatch.setattr(resource_usage, "EVERY_S", 0.0)
    made = Sampler("rank 1 of job test")
    yield made
    made.stop()


def accelerator(sampler: Sampler) -> p.AcceleratorVitals:
    """As soon as its thread has sampled it."""

    def found() -> p.AcceleratorVitals | None:
        vitals = sampler.sample()
        assert vitals is not None
        return vitals.accelerator

    return until(found, "a sample of the accelerator")


def test_this_process(sampler: Sampler) -> None:
    sum(range(200_000))
    found = sampler.sample()
    assert found is not None
    assert found.cpu_percent >= 0
    assert found.memory_bytes > 1 << 20


def test_a_heartbeat_carries_only_new_vitals() -> None:
    sampler = Sampler("rank 1 of job test")
    assert sampler.sample() is not None
    assert sampler.sample() is None
    sampler.stop()


def test_without_a_driver_there_are_no_gpu_facts(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    sampler.sample()
    until(lambda: not sampler._accelerator._thread.alive, "the end of its thread")
    found = sampler.sample()
    assert found is not None
    assert found.accelerator is None


@pytest.mark.parametrize(
    ("visible", "local_rank", "own"),
    [(None, 3, "GPU-3"), ("4,5,6,7", 2, "GPU-6"), ("5", 3, "GPU-5"), ("GPU-1,GPU-2", 1, "GPU-2")],
)
def test_the_gpu_is_this_workers(
    visible: str | None, local_rank: int, own: str, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first one of the node, whatever the worker's local rank is."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with driver(*(GPUFake(f"GPU-{index}") for index in range(8))):
        assert accelerator(sampler).device == own
        sampler.stop()
