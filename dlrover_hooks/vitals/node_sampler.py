"""What a node uses: CPU, memory and network of the machine, and limits of the control groups around this process."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from dlrover_hooks.host import cgroups, memory_limit
from dlrover_hooks.protocol import CPUVitals, MemoryVitals, NetworkVitals
from dlrover_hooks.vitals.counters import CounterRate


class NodeSampler:
    """Rates are means since the last call of the same method. Not thread-safe: one thread owns it."""

    def __init__(self, proc: str = "/proc") -> None:
        self._cpu_groups, self._memory_groups = _groups("cpu", proc), _groups("memory", proc)
        self._busy, self._received, self._sent = CounterRate(), CounterRate(), CounterRate()
        self._periods: dict[str, tuple[int, int]] = {}
        self.cpu()
        self.network()

    def cpu(self) -> CPUVitals:
        """CPU use and quota. Raises OSError without /proc."""
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        limits = [(cores, group) for group in self._cpu_groups if (cores := _quota_cores(group)) is not None]
        limit, group = min(limits, default=(None, None), key=lambda one: one[0])
        return CPUVitals(
            cores=os.cpu_count() or 1,
            busy_cores=self._busy.per_s(busy_s, time.monotonic()),
            load=os.getloadavg(),
            limit_cores=limit,
            throttled_percent=self._throttled_percent(group) if group is not None else None,
        )

    def memory(self) -> MemoryVitals:
        """Memory use and limit. Raises OSError without /proc."""
        machine = psutil.virtual_memory()
        limits = [limit for group in self._memory_groups for limit in memory_limit.limits(group)]
        least = min(limits, default=None, key=lambda limit: limit.left)
        return MemoryVitals(
            total_bytes=machine.total,
            used_bytes=max(0, machine.total - machine.available),
            limit_bytes=least.nbytes if least is not None else None,
            limit_used_bytes=max(0, least.used) if least is not None else None,
            oom_kills=memory_limit.oom_kills(self._memory_groups),
        )

    def network(self) -> NetworkVitals:
        """Of all interfaces but loopback; one that is a part of a bond or a bridge is counted with that."""
        counted = [
            one
            for name, one in psutil.net_io_counters(pernic=True, nowrap=False).items()
            if name != "lo" and not os.path.lexists(f"/sys/class/net/{name}/master")
        ]
        now = time.monotonic()
        return NetworkVitals(
            received_bytes_per_s=self._received.per_s(sum(one.bytes_recv for one in counted), now),
            sent_bytes_per_s=self._sent.per_s(sum(one.bytes_sent for one in counted), now),
        )

    def _throttled_percent(self, group: cgroups.Group) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            rows = group.table("cpu.stat")
            periods, throttled = rows["nr_periods"], rows["nr_throttled"]
            before = self._periods.get(group.folder, (periods, throttled))
            self._periods[group.folder] = periods, throttled
            if periods > before[0]:
                return 100.0 * max(0, throttled - before[1]) / (periods - before[0])
            return 0.0
        return None


def _groups(controller: str, proc: str) -> list[cgroups.Group]:
    with contextlib.suppress(OSError, ValueError):
        return list(cgroups.around(controller, proc))
    return []


def _quota_cores(group: cgroups.Group) -> float | None:
    """The CPU quota of one control group; None: it has none."""
    with contextlib.suppress(OSError, ValueError):
        if group.kind == "cgroup2":
            quota, period = group.read("cpu.max").split()
        else:
            quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
        if quota != "max" and int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None
