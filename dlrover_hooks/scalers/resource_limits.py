"""Limits of processor time and memory for the processes of a node, by what this machine allows."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource as rlimits
import signal
import threading
import time
from collections.abc import Iterator

import psutil

from dlrover_hooks.host import cgroups
from dlrover_hooks.host.cgroups import Group, OwnGroup
from dlrover_hooks.host.memory_limit import MemoryKills, oom_kills
from dlrover_hooks.host.prepared_process import Preparation
from dlrover_hooks.protocol import NodeResource
from dlrover_hooks.scalers.core_assignment import CoreAssignment

log = logging.getLogger("dlrover_hooks.scaler")
_PREFIX = "dlrover-hooks-node-"
_MIB = 1 << 20
_REMOVED_S = 5.0


class LimitMethods:
    """Decides once how nodes are limited on this machine, and makes the limits of each. Any thread.

    CPU: each node gets whole cores by affinity, and where this user can make control groups, its exact share by a
    quota. Memory: by a control group, where the kernel kills a process of the node that needs more; elsewhere by
    RLIMIT_DATA of each process, where an allocation beyond it fails. RLIMIT_DATA counts the private writable memory of
    one process, with what it has reserved and not touched, and without shared memory. GPUs are not limited here.

    Args:
        job: its name, for the log.
        control_groups: False: do not use any.
    """

    def __init__(self, job: str, *, control_groups: bool = True) -> None:
        self._cores = CoreAssignment(os.sched_getaffinity(0))
        self._cpu = cgroups.parent_for("cpu") if control_groups else None
        self._memory = cgroups.parent_for("memory") if control_groups else None
        two = [group for group in {self._cpu, self._memory} if group is not None and group.kind == "cgroup2"]
        if len(two) == 2:  # a process is in one group of v2
            self._cpu = None
        self._lock, self._number = threading.Lock(), 0
        self._kills, self._leftover = MemoryKills(), list[OwnGroup]()
        for parent in {self._cpu, self._memory} - {None}:
            assert parent is not None
            _remove_stale(parent)
        log.info("job %s: CPU of nodes is limited by %s; memory by %s", job, self.cpu_method, self.memory_method)

    @property
    def cpu_method(self) -> str:
        """How CPU time is limited, in words."""
        quota = f" and a quota in {self._cpu.kind} {self._cpu.folder}" if self._cpu is not None else ""
        return f"affinity to {len(self._cores.cores)} cores{quota}"

    @property
    def memory_method(self) -> str:
        """How memory is limited, in words."""
        if self._memory is not None:
            return f"{self._memory.kind} {self._memory.folder}"
        return "RLIMIT_DATA of each process, as this user can make no memory cgroup: allocations beyond it fail"

    @property
    def counts_kills(self) -> bool:
        """Whether a process that was killed for the memory of its own node is known for certain."""
        return self._memory is not None

    def limit(self, name: str, resource: NodeResource) -> NodeLimits:
        """Limits for one new node. Raises OSError if the kernel refuses them."""
        with self._lock:
            self._number += 1
            key = f"{_PREFIX}{os.getpid()}-{self._number}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:100]}"
        made: dict[str, OwnGroup] = {}
        try:
            for controller, parent in (("cpu", self._cpu), ("memory", self._memory)):
                if parent is not None:
                    made[controller] = OwnGroup(parent, key)
            limits = NodeLimits(self, key, made)
            limits.resize(resource)
        except OSError:
            self.removed(key, list(made.values()))
            raise
        return limits

    def look(self) -> None:
        """Call it about once a second: notes whether the kernel has killed a process around this one."""
        with self._lock:
            self._kills.recent(time.monotonic())

    def close(self) -> None:
        """Remove what is left of the control groups of nodes that have ended. Takes some seconds at most."""
        deadline = time.monotonic() + _REMOVED_S
        ended = threading.Event()
        while self._sweep() and time.monotonic() < deadline:
            ended.wait(0.02)

    # ---- of NodeLimits ----------------------------------------------------------------------------------------------

    def cores(self, key: str, cpu: float) -> frozenset[int]:
        """Cores of the node `key` from now on."""
        with self._lock:
            return self._cores.assign(key, cpu)

    def removed(self, key: str, groups: list[OwnGroup]) -> None:
        """The node `key` has ended: its groups are removed, now or later."""
        with self._lock:
            self._cores.free(key)
            self._leftover += groups
        self._sweep()

    def killed_around(self) -> bool:
        """The kernel has just killed a process of this process's own group for want of memory."""
        with self._lock:
            return self._kills.recent(time.monotonic())

    def _sweep(self) -> bool:
        with self._lock:
            self._leftover = [group for group in self._leftover if not group.remove()]
            return bool(self._leftover)


class NodeLimits:
    """The limits of one node, made by `LimitMethods.limit`. One thread at a time."""

    def __init__(self, methods: LimitMethods, key: str, groups: dict[str, OwnGroup]) -> None:
        self._methods, self._key, self._groups = methods, key, groups
        self._resource, self._data_limited = NodeResource(), False
        self._at: frozenset[int] = methods.cores(key, 0.0)

    @contextlib.contextmanager
    def entrance(self) -> Iterator[Preparation]:
        """For `Child`, inside the `with` block: the new process, and so every descendant of it, is limited."""
        with contextlib.ExitStack() as opened:
            cgroups = tuple(
                opened.enter_context(open(path, "wb", buffering=0)).fileno()
                for path in sorted({group.entrance for group in self._groups.values()})
            )
            yield Preparation(cgroups=cgroups, cores=self._at, data_bytes=self._data_limit)

    def apply(self, pid: int) -> None:
        """Limit a process that runs already, and its descendants: a process that has ended meanwhile is left out.

        Raises OSError if the kernel refuses it.
        """
        for each in _tree(pid):
            with _unless_gone():
                for group in self._groups.values():
                    with open(group.entrance, "w") as file:
                        file.write(str(each))
                self._bind(each)

    def resize(self, resource: NodeResource, pid: int | None = None) -> None:
        """Change the limits, also of the process `pid` and its descendants, which run under them.

        Raises OSError if the kernel refuses it: it takes no memory limit below what is used.
        """
        if "memory" in self._groups:
            self._check_used(resource.memory * _MIB)
            self._groups["memory"].limit_memory(resource.memory * _MIB)
        if "cpu" in self._groups:
            self._groups["cpu"].limit_cpu(resource.cpu)
        self._at = self._methods.cores(self._key, resource.cpu)
        self._data_limited = self._data_limit is not None
        self._resource = resource
        for each in _tree(pid) if pid is not None else ():
            with _unless_gone():
                self._bind(each)

    def killed_for_memory(self, exit_code: int) -> bool:
        """Whether the node, which has ended with `exit_code`, ended for want of memory.

        With a memory cgroup: it failed, and the kernel has killed a process in it, perhaps a descendant. Without one
        only this is known: it was killed by SIGKILL, and within the last seconds the kernel killed a process of the
        group around this process for want of memory. A process that fails because of RLIMIT_DATA ends as its
        program decides, with a MemoryError or std::bad_alloc: that cannot be told from any other error.
        """
        if exit_code == 0:
            return False
        if "memory" in self._groups and (oom_kills([self._groups["memory"].group]) or 0) > 0:
            return True
        return exit_code == -signal.SIGKILL and self._methods.killed_around()

    def explain(self, exit_code: int) -> str:
        """What a reader of the log should know about this end; often empty."""
        if exit_code == 0 or self._data_limit is None:
            return ""
        return f"each of its processes could use {self._resource.memory} MiB: beyond that allocations failed"

    def close(self) -> None:
        """The node has ended: free its cores, and kill what is left in its groups. Idempotent."""
        self._methods.removed(self._key, list(self._groups.values()))
        self._groups = {}

    @property
    def _data_limit(self) -> int | None:
        """For RLIMIT_DATA, which only replaces a memory cgroup."""
        return self._resource.memory * _MIB if self._resource.memory and not self._methods.counts_kills else None

    def _bind(self, pid: int) -> None:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with _unless_gone():
                os.sched_setaffinity(int(thread), self._at)
        limit = self._data_limit
        if limit is not None or self._data_limited:
            hard = rlimits.prlimit(pid, rlimits.RLIMIT_DATA)[1]
            rlimits.prlimit(pid, rlimits.RLIMIT_DATA, (hard if limit is None else limit, hard))

    def _check_used(self, nbytes: int) -> None:
        group = self._groups["memory"].group
        name = "memory.current" if group.kind == "cgroup2" else "memory.usage_in_bytes"
        if nbytes and (used := int(group.read(name))) > nbytes:
            raise OSError(errno.EBUSY, f"{used // _MIB} MiB are used, more than the new limit of {nbytes // _MIB} MiB")


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Nothing happens to a process or thread that ends meanwhile."""
    try:
        yield
    except (ProcessLookupError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise


def _tree(pid: int) -> list[int]:
    """The process and its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _remove_stale(parent: Group) -> None:
    """Remove the empty groups of processes that were killed before they could do so."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent.folder):
            found = re.fullmatch(rf"{_PREFIX}(\d+)-.*", name)
            if found is not None and not os.path.exists(f"/proc/{found[1]}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent.folder}/{name}")
