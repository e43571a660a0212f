"""The processors of this machine: CPUs that this process may use, NVIDIA GPUs that its driver knows."""

from __future__ import annotations

import os

import pynvml

from dlrover_hooks.host.visible_gpus import visible


def cpus() -> int:
    """CPUs that this process may run on, as `taskset` and cgroups' cpusets leave them."""
    return len(os.sched_getaffinity(0))


def gpus(names: str | None) -> int:
    """Number of NVIDIA GPUs that CUDA would show this process; 0 without a driver.

    names: CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    try:
        pynvml.nvmlInit()
        return len(visible(names, gpu_uuids()))
    except pynvml.NVMLError:
        return 0


def gpu_uuids() -> list[str]:
    """UUIDs of the machine's NVIDIA GPUs, by the driver's index. Call `nvmlInit` before. Raises NVMLError."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
