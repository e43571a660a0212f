"""What this worker uses: its process and its accelerator. Sent with its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from dlrover_hooks import config as settings
from dlrover_hooks.protocol import AcceleratorVitals, Vitals
from dlrover_hooks.vitals.background_sample import EVERY_S, BackgroundSample

_STOP_S = 1.0


class Sampler:
    """Samples this process. Not thread-safe: one thread owns it, and `stop` is called after its end.

    where: the job and rank that warnings name.
    """

    def __init__(self, where: str) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._accelerator = BackgroundSample(
            "dlrover-hooks-accelerator", _accelerator, where=where, what="the accelerator"
        )
        self._due = 0.0

    def sample(self) -> Vitals | None:
        """`cpu_percent` is the mean since the last sample; None: the last sample is not `EVERY_S` old yet."""
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + EVERY_S
        self._accelerator.start()
        memory = self._process.memory_info().rss
        return Vitals(self._process.cpu_percent(), memory, self._accelerator.value)

    def stop(self) -> None:
        """No more samples of the accelerator. Idempotent."""
        self._accelerator.stop(_STOP_S)


def _accelerator() -> Callable[[], AcceleratorVitals] | None:
    from dlrover_hooks.vitals import accelerators

    return accelerators.sampler(settings.place().local_rank, settings.visible_gpus())
