"""The control groups around this process, v1 and v2: the folders of the kernel's files about them."""

from __future__ import annotations

import os
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
