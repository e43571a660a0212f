"""Whether this process does something: evaluates, or writes a file, while it makes no training step."""

from __future__ import annotations

import contextlib
import os

CPU_SHARE = 0.1
"""Seconds of CPU per second, of all threads, from which a process counts as active. This library's own threads and a
loop that polls each 10 ms stay below.
"""
IO_BYTES_PER_S = 1 << 20
"""Bytes read or written per second from which a process counts as active: a slow disk takes little CPU."""


class ProcessActivity:
    """Compares the process's counters between two looks. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self._now, self._cpu_s, self._io_bytes = 0.0, _cpu_s(), _io_bytes()

    def look(self, now: float) -> bool:
        """Whether the process was active since the last look. `now`: monotonic seconds."""
        seconds, cpu_s, io_bytes = now - self._now, _cpu_s(), _io_bytes()
        active = cpu_s - self._cpu_s > CPU_SHARE * seconds or io_bytes - self._io_bytes > IO_BYTES_PER_S * seconds
        self._now, self._cpu_s, self._io_bytes = now, cpu_s, io_bytes
        return active


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def _io_bytes() -> int:
    """Bytes of all `read` and `write` calls: `rchar` and `wchar` of proc(5). 0 where the kernel does not count them."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/io", "rb") as counters:
        return sum(int(line.split()[1]) for line in counters.read().splitlines()[:2])
    return 0
