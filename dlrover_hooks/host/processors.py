"""How many processors of a kind this machine offers a job: CPUs that this process may use, GPUs that it may see."""

from __future__ import annotations

import os

import pynvml


def cpus() -> int:
    """CPUs that this process may run on, as `taskset` and cgroups' cpusets leave them."""
    return len(os.sched_getaffinity(0))


def gpus(visible: str | None) -> int:
    """NVIDIA GPUs that CUDA would show this process; 0 without a driver.

    visible: CUDA_VISIBLE_DEVICES, None if it is not set. As CUDA does, what follows an unknown index is left out; names
    (`GPU-...`, `MIG-...`) are not checked.
    """
    try:
        pynvml.nvmlInit()
        there = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0
    if visible is None:
        return there
    found = 0
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name.lstrip("-").isdigit() and not 0 <= int(name) < there:
            break
        found += 1
    return found
