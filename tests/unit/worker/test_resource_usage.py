"""What a heartbeat carries of its process."""

from __future__ import annotations

import pynvml
import pytest

from dlrover_hooks.worker import resource_usage


def test_this_process() -> None:
    sampler = resource_usage.Sampler()
    sum(range(200_000))
    found = sampler.sample()
    assert found.cpu_percent >= 0
    assert found.memory_bytes > 1 << 20


def test_without_a_driver_there_are_no_gpu_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    found = resource_usage.Sampler().sample()
    assert (found.gpu_percent, found.gpu_memory_bytes) == (None, None)


def test_a_gpu_that_falls_off_the_bus_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: object())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    found = resource_usage.Sampler().sample()
    assert (found.gpu_percent, found.gpu_memory_bytes) == (None, None)


@pytest.mark.parametrize(
    ("visible", "local_rank", "own"),
    [(None, 3, 3), ("4,5,6,7", 2, 6), ("5", 3, 5), ("GPU-a,GPU-b", 1, "GPU-b")],
)
def test_the_gpu_is_this_workers(
    visible: str | None, local_rank: int, own: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first one of the node, whatever the worker's local rank is."""
    asked: list[int | str] = []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    for name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
        monkeypatch.setattr(pynvml, name, asked.append)
    resource_usage.Sampler()
    assert asked == [own]
