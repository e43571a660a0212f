"""How much memory this process may still allocate: the smallest limit of machine and cgroups. Does not import torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dlrover_hooks.host import cgroups

_NO_LIMIT = 1 << 60
_CGROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


RECENT_S = 5.0
"""A worker whose end is found so long after a kill for want of memory is taken for its victim."""


class Free(NamedTuple):
    """`nbytes` may still be allocated; `where` names the limit that decides."""

    nbytes: int
    where: str


class Limit(NamedTuple):
    """Bytes that the processes of a control group may use, and bytes in use, without inactive file pages."""

    nbytes: int
    used: int

    @property
    def left(self) -> int:
        """What may still be allocated."""
        return max(self.nbytes - self.used, 0)


def free(proc: str = "/proc") -> Free:
    """The smallest remaining allowance. Inactive file pages count as free, because the kernel reclaims them first."""
    with open(f"{proc}/meminfo") as file:
        rows = dict(line.split(":", 1) for line in file)
    found = [Free(int(rows["MemAvailable"].split()[0]) * 1024, "the machine")]
    with contextlib.suppress(OSError, ValueError):
        for group in cgroups.around("memory", proc):
            found += [Free(limit.left, f"cgroup {group.folder}") for limit in limits(group)]
    return min(found)


def limits(group: cgroups.Group) -> Iterator[Limit]:
    """The memory limit of one control group, if it has one."""
    limit_name, used_name, cached_name = _CGROUP_FILES[group.kind]
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit; the root cgroup has no such files
        limit = int(group.read(limit_name))
        used = int(group.read(used_name)) - group.table("memory.stat").get(cached_name, 0)
        if limit < _NO_LIMIT:
            yield Limit(limit, used)


class MemoryKills:
    """Notices that the kernel has killed a process of this control group for want of memory. One thread owns it."""

    def __init__(self) -> None:
        self._groups = list[cgroups.Group]()
        with contextlib.suppress(OSError, ValueError):
            self._groups = list(cgroups.around("memory"))
        self._counted, self._seen_at = oom_kills(self._groups), -math.inf

    def recent(self, now: float) -> bool:
        """A look at `now` (monotonic seconds), or one in the `RECENT_S` before, has found a new kill.

        Call it about once a second: the time of a kill is that of the look that finds it.
        """
        before, self._counted = self._counted, oom_kills(self._groups)
        if self._counted is not None and before is not None and self._counted > before:
            self._seen_at = now
        return now - self._seen_at <= RECENT_S


def oom_kills(groups: Iterable[cgroups.Group]) -> int | None:
    """How many processes of the innermost of `groups` that counts them the kernel has killed for want of memory.

    None: no group counts them.
    """
    for group in groups:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return group.table("memory.events" if group.kind == "cgroup2" else "memory.oom_control")["oom_kill"]
    return None
