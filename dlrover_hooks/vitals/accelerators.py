"""The accelerator of a worker, of whatever vendor: plug-ins of the entry point group `dlrover_hooks.accelerators`.

An entry point is a function `find(local_rank: int) -> Accelerator | None`; None: this worker has none of its kind. It
reads its vendor's variables of the environment by itself. The first one, by name, that finds a device is used, then
NVIDIA's driver is asked. All of this runs in a thread of its own, and an error costs only the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol

import msgspec

from dlrover_hooks.protocol import AcceleratorVitals
from dlrover_hooks.vitals import nvidia

log = logging.getLogger("dlrover_hooks")
GROUP = "dlrover_hooks.accelerators"


class Accelerator(Protocol):
    """One device. `sample` is called by one thread, each few seconds. It may raise: that is logged once."""

    @property
    def name(self) -> str:
        """The model, such as "NVIDIA H100 80GB HBM3"."""
        ...

    def sample(self) -> AcceleratorVitals:
        """What it uses now."""
        ...


def sampler(local_rank: int, visible_gpus: str | None) -> Callable[[], AcceleratorVitals] | None:
    """The function that samples the device of `find`. It raises ValidationError for what no master would accept."""
    found = find(local_rank, visible_gpus)
    if found is None:
        return None
    return lambda: msgspec.json.decode(msgspec.json.encode(found.sample()), type=AcceleratorVitals)


def find(local_rank: int, visible_gpus: str | None) -> Accelerator | None:
    """The device of this worker; None without one. `visible_gpus`: CUDA_VISIBLE_DEVICES, None if it is not set."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            search: Callable[[int], Accelerator | None] = entry.load()
            if (found := search(local_rank)) is not None:
                return found
        except Exception as error:
            log.warning("the accelerator plug-in %s (%s) is left out: %s: %s", entry.name, entry.value,
                        type(error).__name__, error)  # fmt: skip
    return nvidia.find(local_rank, visible_gpus)
