"""The control groups around this process, v1 and v2: the folders of the kernel's files about them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
from collections.abc import Iterator
from typing import NamedTuple


class Group(NamedTuple):
    """`kind`: "cgroup" (v1) or "cgroup2"."""

    kind: str
    folder: str

    def read(self, name: str) -> str:
        """The content of its file `name`. Raises OSError: the root group, for example, has no limits."""
        with open(f"{self.folder}/{name}") as file:
            return file.read()

    def table(self, name: str) -> dict[str, int]:
        """A file with a name and a number in each line. Raises OSError, ValueError."""
        return {row: int(value) for row, value in (line.split() for line in self.read(name).splitlines())}


def around(controller: str, proc: str = "/proc") -> Iterator[Group]:
    """The groups with `controller`, such as "memory", in which this process is: its own, then each enclosing one.

    A limit may be set at any of them. Groups of v2 are listed whatever their controllers are. Raises OSError,
    ValueError.
    """
    with open(f"{proc}/self/cgroup") as file:
        groups = {names: path for _, names, path in (line.strip().split(":", 2) for line in file)}
    for kind, root, mounted in _mounts(controller, proc):
        names = (names for names in groups if names == "" or controller in names.split(","))
        path = next((groups[name] for name in names if bool(name) == (kind == "cgroup")), root)
        below = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
        folder = os.path.normpath(f"{mounted}/{below}")
        while folder.startswith(mounted):
            yield Group(kind, folder)
            if (above := os.path.dirname(folder)) == folder:
                break
            folder = above


def _mounts(controller: str, proc: str) -> Iterator[tuple[str, str, str]]:
    """Kind, root and mount point of the trees that may have `controller`."""
    with open(f"{proc}/self/mountinfo") as file:
        for line in file:
            left, right = line.split(" - ", 1)
            kind, _, options = right.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and controller in options.strip().split(",")):
                _, _, _, root, mounted, *_ = left.split()
                yield kind, root, mounted


class OwnGroup:
    """A control group that this process has made, for other processes. One thread at a time.

    Raises OSError from every method except `remove` if the kernel or this user's rights do not allow it.
    """

    def __init__(self, parent: Group, name: str) -> None:
        self.group = Group(parent.kind, f"{parent.folder}/{name}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.group.folder)

    @property
    def entrance(self) -> str:
        """The file into which a process id is written; 0 is the writer."""
        return f"{self.group.folder}/cgroup.procs"

    def limit_memory(self, nbytes: int) -> None:
        """At most so many bytes, and no swap in their place. 0: no limit."""
        if self.group.kind == "cgroup2":
            with contextlib.suppress(OSError):  # a kernel without swap does not have it
                self._write("memory.swap.max", "0" if nbytes else "max")
            self._write("memory.max", str(nbytes or "max"))
            return
        both = str(nbytes or -1)
        with contextlib.suppress(OSError):  # of memory and swap together: never the smaller one of the two limits
            self._write("memory.memsw.limit_in_bytes", both)
        self._write("memory.limit_in_bytes", both)
        with contextlib.suppress(OSError):
            self._write("memory.memsw.limit_in_bytes", both)

    def limit_cpu(self, cores: float) -> None:
        """At most the time of so many cores, counted in periods of 0.1 s. 0: no limit.

        An enclosing group with a smaller limit decides.
        """
        quota = max(_LEAST_QUOTA_US, round(cores * _PERIOD_US))
        if self.group.kind == "cgroup2":
            self._write("cpu.max", f"{quota if cores else 'max'} {_PERIOD_US}")
            return
        self._write("cpu.cfs_period_us", str(_PERIOD_US))
        try:
            self._write("cpu.cfs_quota_us", str(quota if cores else -1))
        except OSError as error:
            if error.errno != errno.EINVAL:  # more than the enclosing group has
                raise

    def pids(self) -> list[int]:
        """Processes in it."""
        return [int(line) for line in self.group.read("cgroup.procs").split()]

    def remove(self) -> bool:
        """Kill the processes in it and remove it; False: they have not ended yet, call it again."""
        with contextlib.suppress(OSError):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.rmdir(self.group.folder)
        return not os.path.exists(self.group.folder)

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.group.folder}/{name}", "w") as file:
            file.write(text)


_PERIOD_US, _LEAST_QUOTA_US = 100_000, 1_000
"""The kernel's default period, and the least quota that it takes (Documentation/scheduler/sched-bwc.rst)."""
_FILE_OF = {
    "memory": {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"},
    "cpu": {"cgroup2": "cpu.max", "cgroup": "cpu.cfs_quota_us"},
}


def parent_for(controller: str, proc: str = "/proc") -> Group | None:
    """The group in which this process may make others that `controller` ("memory" or "cpu") limits; None: none.

    It is this process's own one, or in v2, where a group with processes has no groups with limits inside, an enclosing
    one. No limit that holds for this process is escaped.
    """
    with contextlib.suppress(OSError, ValueError):
        for kind, tree in itertools.groupby(around(controller, proc), key=lambda group: group.kind):
            for group in tree:
                if _can_limit(group, controller):
                    return group
                if kind == "cgroup" or _is_limited(group, controller):
                    break
    return None


def _is_limited(group: Group, controller: str) -> bool:
    with contextlib.suppress(OSError):  # the root group has no such file
        return not group.read(_FILE_OF[controller]["cgroup2"]).startswith("max")
    return False


def _can_limit(group: Group, controller: str) -> bool:
    probe = f"dlrover-hooks-probe-{os.getpid()}"
    with contextlib.suppress(OSError):
        if group.kind == "cgroup2" and controller not in group.read("cgroup.subtree_control").split():
            with open(f"{group.folder}/cgroup.subtree_control", "w") as file:
                file.write(f"+{controller}")
        made = OwnGroup(group, probe)
        try:
            return os.access(f"{made.group.folder}/{_FILE_OF[controller][group.kind]}", os.W_OK) and os.access(
                made.entrance, os.W_OK
            )
        finally:
            made.remove()
    return False
