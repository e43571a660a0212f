"""The cluster monitor: writes what a platform has, and which jobs run on it, into the database.

One implementation for each platform; that of processes is here. Plans are made from the database alone, so a platform
without a monitor gets plans, too, but none that divide it among jobs.
"""

from __future__ import annotations

import logging
import socket
from abc import ABCMeta, abstractmethod

import psutil
import sqlalchemy as sa

from dlrover_hooks.errors import DatabaseFailed
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.tables import cluster_sample
from dlrover_hooks.protocol.samples import ClusterJob, ClusterSample

_log = logging.getLogger("dlrover_hooks.brain")
EVERY_S = 30.0
"""Between two samples; a view of the cluster uses those of the last ten minutes."""
_JOB = "DLROVER_HOOKS_JOB"


class ClusterMonitor(metaclass=ABCMeta):
    """Knows one platform."""

    @abstractmethod
    def collect(self) -> ClusterSample:
        """What the platform has now. Called on the thread of `ClusterSampler`; it must return within seconds."""


class ProcessClusterMonitor(ClusterMonitor):
    """This machine and the processes of jobs on it, which have the name of the job in their environment.

    Of other users' processes only root sees the environment.
    """

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        psutil.cpu_percent()

    def collect(self) -> ClusterSample:
        """See the base class. Cores used are those since the call before."""
        memory = psutil.virtual_memory()
        cores = psutil.cpu_count() or 1
        return ClusterSample(
            "process", socket.gethostname(), {"cpu": cores}, psutil.cpu_percent() / 100 * cores, memory.total >> 20,
            (memory.total - memory.available) >> 20, self._jobs(),
        )  # fmt: skip

    def _jobs(self) -> tuple[ClusterJob, ...]:
        found: dict[str, list[tuple[float, int]]] = {}
        alive: dict[int, psutil.Process] = {}
        for seen in psutil.process_iter(["environ"]):
            name = (seen.info["environ"] or {}).get(_JOB)
            if not name:
                continue
            before = self._known.get(seen.pid, seen)
            process = before if before == seen else seen  # the same object measures from call to call
            try:
                found.setdefault(name, []).append((process.cpu_percent() / 100, process.memory_info().rss >> 20))
            except psutil.Error:  # it has ended
                continue
            alive[process.pid] = process
        self._known = alive
        return tuple(
            ClusterJob(name, len(used), round(sum(cpu for cpu, _ in used), 2), sum(memory for _, memory in used))
            for name, used in sorted(found.items())
        )


class ClusterSampler:
    """Writes a sample of `monitor` into the database every `every_s` seconds, on a thread of its own."""

    def __init__(self, monitor: ClusterMonitor, database: Database, every_s: float = EVERY_S) -> None:
        self._monitor, self._database, self._every_s = monitor, database, every_s
        self._thread = BackgroundThread(
            "cluster-monitor", self._run, where=database.name, on_error="warn", again_s=every_s
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()

    def write(self) -> None:
        """One sample. Raises `DatabaseFailed`."""
        found = self._monitor.collect()
        with self._database.writing() as connection:
            now = self._database.now(connection)
            connection.execute(sa.insert(cluster_sample).values(at=now, platform=found.platform, view=found))

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            try:
                self.write()
            except DatabaseFailed as error:
                _log.error("%s; trying again", error)
            self._thread.stopping.wait(self._every_s)
