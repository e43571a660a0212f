"""How much memory this process may still allocate: the smallest limit of machine and cgroups. Does not import torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

_NO_LIMIT = 1 << 60
_CGROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class Free(NamedTuple):
    """`nbytes` may still be allocated; `where` names the limit that decides."""

    nbytes: int
    where: str


def free(proc: str = "/proc") -> Free:
    """The smallest remaining allowance. Inactive file pages count as free, because the kernel reclaims them first."""
    with open(f"{proc}/meminfo") as file:
        rows = dict(line.split(":", 1) for line in file)
    found = [Free(int(rows["MemAvailable"].split()[0]) * 1024, "the machine")]
    with contextlib.suppress(OSError, ValueError):
        found += _cgroups(proc)
    return min(found)


def _cgroups(proc: str) -> Iterator[Free]:
    """The remaining allowance of each enclosing memory cgroup: a limit may be set at any level of the tree."""
    with open(f"{proc}/self/cgroup") as file:
        groups = {names: path for _, names, path in (line.strip().split(":", 2) for line in file)}
    for kind, root, mounted in _mounts(proc):
        names = (names for names in groups if names == "" or "memory" in names.split(","))
        path = next((groups[name] for name in names if bool(name) == (kind == "cgroup")), root)
        below = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
        folder = os.path.normpath(f"{mounted}/{below}")
        while folder.startswith(mounted):
            yield from _rest(folder, *_CGROUP_FILES[kind])
            if (above := os.path.dirname(folder)) == folder:
                break
            folder = above


def _mounts(proc: str) -> Iterator[tuple[str, str, str]]:
    """Kind, root and mount point of the cgroup trees that may limit memory."""
    with open(f"{proc}/self/mountinfo") as file:
        for line in file:
            left, right = line.split(" - ", 1)
            kind, _, options = right.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.strip().split(",")):
                _, _, _, root, mounted, *_ = left.split()
                yield kind, root, mounted


def _rest(folder: str, limit_name: str, used_name: str, cached_name: str) -> Iterator[Free]:
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit; the root cgroup has no such files
        limit = int(_read(f"{folder}/{limit_name}"))
        rows = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
        used = int(_read(f"{folder}/{used_name}")) - int(rows.get(cached_name, 0))
        if limit < _NO_LIMIT:
            yield Free(max(limit - used, 0), f"cgroup {folder}")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
