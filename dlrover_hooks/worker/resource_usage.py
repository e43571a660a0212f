"""Resources used by this process: CPU, memory, GPU. Sampled with each heartbeat."""

from __future__ import annotations

import psutil

from dlrover_hooks import config as settings
from dlrover_hooks.protocol import Vitals


class Sampler:
    """Samples one process; `cpu_percent` is the mean since the last sample. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._gpu = _gpu_handle()

    def sample(self) -> Vitals:
        memory = self._process.memory_info().rss
        return Vitals(self._process.cpu_percent(), memory, *_gpu_use(self._gpu))


def _gpu_handle() -> object | None:
    """NVML's handle of this process's GPU; None without a GPU or driver."""
    import pynvml

    own = settings.gpu()
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(int(own)) if own.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(own)
    except pynvml.NVMLError:
        return None


def _gpu_use(handle: object | None) -> tuple[float | None, int | None]:
    if handle is None:
        return None, None
    import pynvml

    try:
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), int(used)
    except pynvml.NVMLError:
        return None, None
