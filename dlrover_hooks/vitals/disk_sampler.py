"""Free space and transfer rates of the file system that holds a folder."""

from __future__ import annotations

import contextlib
import os
import time

from dlrover_hooks.protocol import DiskVitals
from dlrover_hooks.vitals.counters import CounterRate

_SECTOR_BYTES = 512
"""Of /sys/dev/block/*/stat, whatever the device's own sectors are: Documentation/block/stat.rst of the kernel."""


class DiskSampler:
    """`folder`, or the nearest parent that exists. Calls may block while a network file system does not answer."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._read, self._written = CounterRate(), CounterRate()

    def sample(self) -> DiskVitals:
        """Rates are means since the last call. Raises OSError."""
        folder = self._folder
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        space, now = os.statvfs(folder), time.monotonic()
        sectors = _sectors(os.stat(folder).st_dev)
        return DiskVitals(
            path=folder,
            free_bytes=space.f_bavail * space.f_frsize,
            total_bytes=space.f_blocks * space.f_frsize,
            read_bytes_per_s=self._read.per_s(sectors[0] * _SECTOR_BYTES, now) if sectors else None,
            written_bytes_per_s=self._written.per_s(sectors[1] * _SECTOR_BYTES, now) if sectors else None,
        )


def _sectors(device: int) -> tuple[int, int] | None:
    """Sectors read and written since the start of the machine; None: it is no block device."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat") as file:
            fields = file.read().split()
        return int(fields[2]), int(fields[6])
    return None
