"""An NVIDIA GPU, as its driver's management library (NVML) describes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from dlrover_hooks.host.processors import gpu_uuids
from dlrover_hooks.host.visible_gpus import own, visible
from dlrover_hooks.protocol import AcceleratorVitals

T = TypeVar("T")
THROTTLES = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown (software)",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "thermal slowdown (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
"""Those that take away speed; an idle GPU, and clocks that its owner has set, do not."""


def find(local_rank: int, names: str | None) -> NvidiaGPU | None:
    """The GPU of the worker with this local rank; None: no driver, or CUDA shows none.

    names: CUDA_VISIBLE_DEVICES, None if it is not set. Raises NVMLError for a device that the driver refuses.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    device = own(visible(names, gpu_uuids()), local_rank)
    return None if device is None else NvidiaGPU(device)


class NvidiaGPU:
    """One GPU or MIG instance, by its UUID. Raises NVMLError if the driver has no such device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(device)
        self._board = _known(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, self._handle) or self._handle
        """The GPU itself; a MIG instance has no temperature of its own."""
        self.name: str = _known(pynvml.nvmlDeviceGetName, self._handle) or "NVIDIA GPU"
        self._xid: int | None = None
        self._events = self._listen()

    def sample(self) -> AcceleratorVitals:
        """What this device does not count is None. Raises NVMLError if it has failed, such as one off the bus."""
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        use = _known(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        power_mw = _known(pynvml.nvmlDeviceGetPowerUsage, self._board)
        reasons = _known(pynvml.nvmlDeviceGetCurrentClocksEventReasons, self._board) or 0
        self._hear()
        return AcceleratorVitals(
            name=self.name,
            device=self._device,
            use_percent=None if use is None else float(use.gpu),
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            temperature_c=_known(pynvml.nvmlDeviceGetTemperature, self._board, pynvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            ecc_errors=_known(
                pynvml.nvmlDeviceGetTotalEccErrors,
                self._board,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
            xid=self._xid,
            throttled_by=tuple(text for bit, text in THROTTLES.items() if reasons & bit),
        )

    def _listen(self) -> Any:
        """A set of events that tells of Xid errors; None: the driver offers none here."""
        with contextlib.suppress(pynvml.NVMLError):
            events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._board, pynvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _hear(self) -> None:
        """Take the errors since the last call. An event set ends with the process."""
        with contextlib.suppress(pynvml.NVMLError):  # a timeout is one: there is no further event
            while self._events is not None:
                self._xid = int(pynvml.nvmlEventSetWait_v2(self._events, 0).eventData)


def _known(ask: Callable[..., T], *arguments: Any) -> T | None:
    """The answer; None if this device or this driver has none."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None
