"""NVIDIA GPUs for tests on machines without one: replaces functions of `pynvml` for a while.

To stay close to the real ones each replacement must take the parameters of the function that it replaces, answers with
the structures of pynvml, and refuses with its errors.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pynvml

MIB = 1 << 20


@dataclass
class GPUFake:
    """A GPU; with `board` a MIG instance of that one. Tests may change it while it is in use."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    use_percent: int = 0
    used_bytes: int = 0
    total_bytes: int = 81559 * MIB
    temperature_c: int = 30
    power_mw: int = 70_000
    ecc_errors: int = 0
    reasons: int = 0
    """Of its clocks: bits of `nvmlClocksEventReason...`."""
    xids: list[int] = field(default_factory=list)
    """Errors that were not reported yet."""
    lacks: frozenset[str] = frozenset()
    """Functions that it does not support."""
    lost: bool = False
    """It has fallen off the bus."""
    board: GPUFake | None = None


@contextlib.contextmanager
def driver(*gpus: GPUFake) -> Iterator[None]:
    """While it lasts, NVML shows these GPUs. Raises TypeError if a replaced function has other parameters by now."""
    real = {name: getattr(pynvml, name) for name in _NAMES}
    fake = _Driver(gpus)
    try:
        for name, function in real.items():
            setattr(pynvml, name, _fitting(name, function, getattr(fake, _NAMES[name])))
        yield
    finally:
        for name, function in real.items():
            setattr(pynvml, name, function)


def _fitting(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    there, here = (list(inspect.signature(one).parameters) for one in (real, fake))
    if there != here:
        raise TypeError(f"pynvml.{name} takes {there}, its fake {here}")

    def call(*arguments: Any) -> Any:
        device = arguments[0] if arguments else None
        if isinstance(device, GPUFake) and device.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if isinstance(device, GPUFake) and name in device.lacks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return fake(*arguments)

    return call


class _Driver:
    def __init__(self, gpus: tuple[GPUFake, ...]) -> None:
        self._boards = [gpu for gpu in gpus if gpu.board is None]
        self._all = gpus

    def init(self) -> None:
        pass

    def count(self) -> int:
        return len(self._boards)

    def by_index(self, index: int) -> GPUFake:
        if not 0 <= index < len(self._boards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._boards[index]

    def by_uuid(self, uuid: str) -> GPUFake:
        found = next((gpu for gpu in self._all if gpu.uuid == uuid), None)
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found

    def uuid(self, handle: GPUFake) -> str:
        return handle.uuid

    def name(self, handle: GPUFake) -> str:
        return handle.name

    def board(self, migDevice: GPUFake) -> GPUFake:
        if migDevice.board is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return migDevice.board

    def memory(self, handle: GPUFake, version: int | None = None) -> Any:
        found = pynvml.c_nvmlMemory_t()
        found.total, found.used, found.free = (
            handle.total_bytes, handle.used_bytes, handle.total_bytes - handle.used_bytes
        )  # fmt: skip
        return found

    def use(self, handle: GPUFake) -> Any:
        found = pynvml.c_nvmlUtilization_t()
        found.gpu = handle.use_percent
        return found

    def temperature(self, handle: GPUFake, sensor: int) -> int:
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return handle.temperature_c

    def power(self, handle: GPUFake) -> int:
        return handle.power_mw

    def ecc(self, handle: GPUFake, errorType: int, counterType: int) -> int:
        uncorrected = errorType == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return handle.ecc_errors if uncorrected and counterType == pynvml.NVML_VOLATILE_ECC else 0

    def reasons(self, handle: GPUFake) -> int:
        return handle.reasons

    def event_set(self) -> list[GPUFake]:
        return []

    def register(self, handle: GPUFake, eventTypes: int, eventSet: list[GPUFake]) -> None:
        if eventTypes != pynvml.nvmlEventTypeXidCriticalError:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        eventSet.append(handle)

    def wait(self, eventSet: list[GPUFake], timeoutms: int) -> Any:
        for gpu in eventSet:
            if gpu.xids:
                found = pynvml.c_nvmlEventData_t()
                found.eventType, found.eventData = pynvml.nvmlEventTypeXidCriticalError, gpu.xids.pop(0)
                return found
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


_NAMES = {
    "nvmlInit": "init",
    "nvmlDeviceGetCount": "count",
    "nvmlDeviceGetHandleByIndex": "by_index",
    "nvmlDeviceGetHandleByUUID": "by_uuid",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "board",
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetUtilizationRates": "use",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlEventSetCreate": "event_set",
    "nvmlDeviceRegisterEvents": "register",
    "nvmlEventSetWait_v2": "wait",
}
