"""The process trees of workers, from one look at /proc for all of them.

`psutil.Process.children(recursive=True)` reads the state of every process of the machine, once per worker. Here a
process that belongs to no worker is read once and then skipped while it lives, so that the cost depends on the workers'
own processes: a machine with 128 cores has 2000 kernel threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from dlrover_hooks.protocol import MOST_WORKERS, WorkerProcesses

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def uptime_s() -> float:
    """Seconds since the machine's start, the clock of the kernel's start times of processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _ProcessStat(NamedTuple):
    parent: int
    ticks: int
    """Of CPU time."""
    started: int
    pages: int
    """Resident."""


class ProcessTrees:
    """Not thread-safe: one thread owns it. `proc`: where the kernel's process file system is."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._roots: Mapping[str, int] = {}
        self._others = set[int]()
        """Processes outside all trees."""
        self._before: dict[int, _ProcessStat] = {}
        self._at: float | None = None

    def sample(self, roots: Mapping[str, int], now: float) -> tuple[WorkerProcesses, ...]:
        """One entry for each of the first `MOST_WORKERS` of `roots` (process id by incarnation) that runs.

        CPU use is the mean since the last call, over the processes that run now. `now`: seconds since the machine's
        start, see `uptime_s`.
        """
        if roots != self._roots:  # a standby and its children belong to a worker from now on
            self._roots, self._others = dict(roots), set()
        listed = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._others &= listed
        found = {pid: process for pid in listed - self._others if (process := self._read(pid)) is not None}
        tree = {pid: name for name, pid in list(roots.items())[:MOST_WORKERS] if pid in found}
        members: dict[str, list[int]] = {name: [] for name in tree.values()}
        for pid in found:
            if (name := _tree_of(pid, found, tree)) is None:
                self._others.add(pid)
            else:
                members[name].append(pid)
        elapsed_s = now - self._at if self._at is not None else 0.0
        uses = tuple(self._use(name, pids, found, elapsed_s) for name, pids in members.items())
        self._before, self._at = {pid: found[pid] for pids in members.values() for pid in pids}, now
        return uses

    def _use(self, name: str, pids: list[int], found: dict[int, _ProcessStat], elapsed_s: float) -> WorkerProcesses:
        ticks = sum(self._new_ticks(pid, found[pid]) for pid in pids)
        percent = 100.0 * ticks / _TICKS_PER_S / elapsed_s if elapsed_s > 0 else 0.0
        return WorkerProcesses(name, len(pids), percent, sum(found[pid].pages for pid in pids) * _PAGE_BYTES)

    def _new_ticks(self, pid: int, process: _ProcessStat) -> int:
        """Since the last call. Those of a standby, which ran before it was a worker, count from the next call on."""
        before = self._before.get(pid)
        if before is not None and before.started == process.started:
            return process.ticks - before.ticks
        started_since = self._at is not None and process.started >= int(self._at * _TICKS_PER_S)
        return process.ticks if started_since else 0

    def _read(self, pid: int) -> _ProcessStat | None:
        """From /proc/PID/stat, see proc(5); None if it has ended meanwhile."""
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        return _ProcessStat(int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]), int(fields[21]))


def _tree_of(pid: int, found: Mapping[int, _ProcessStat], tree: dict[int, str]) -> str | None:
    """The worker whose descendant `pid` is; None: of none. A process of a known tree is recorded in `tree`."""
    path: list[int] = []
    while pid in found and pid not in tree:
        path.append(pid)
        pid = found[pid].parent
    name = tree.get(pid)
    if name is not None:
        tree.update(dict.fromkeys(path, name))
    return name
