"""Whether there is room: memory for the slots of a node's workers, disk for the generations that are kept. No torch.

`memory` and `disk` decide from numbers alone and give a line for a person; the rest reads those numbers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dlrover_hooks.checkpoint.arena import SLOTS
from dlrover_hooks.checkpoint.place import Place

TIGHT = 0.9
"""It is tight where more than this share of what is free is needed."""
_NO_LIMIT = 1 << 60
_CGROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class Free(NamedTuple):
    """`nbytes` may still be used; `where` sets that limit."""

    nbytes: int
    where: str


class Verdict(NamedTuple):
    """`line` says what is needed and what there is; `hint` what to do where it is tight, or does not fit."""

    fits: bool
    tight: bool
    line: str
    hint: str = ""


def memory(slot_bytes: int, workers: int, free: Free) -> Verdict:
    """Whether the slots of `workers` more workers fit into `free`."""
    need = SLOTS * slot_bytes * workers
    each = f" for each of {workers} workers" if workers > 1 else ""
    hint = (
        f"in-memory checkpoints need {SLOTS} times the state's size per worker: start fewer workers on this node, or "
        f"give it more memory ({free.where} sets the limit)"
    )
    return _judge(f"{SLOTS} slots of {size(slot_bytes)}{each} need {size(need)}", need, free, hint)


def disk(image_bytes: int, missing: int, free: Free) -> Verdict:
    """Whether `missing` more generations of `image_bytes` fit at `save_to`: `keep`, and the one being written."""
    need = image_bytes * missing
    each = f"{missing} more generations of {size(image_bytes)}"
    hint = f"free some space at {free.where}, lower `keep`, or choose another `save_to`"
    return _judge(f"{each} at {free.where} need {size(need)}", need, free, hint)


def _judge(what: str, need: int, free: Free, hint: str) -> Verdict:
    fits, tight = need <= free.nbytes, need > TIGHT * free.nbytes
    end = "does not fit" if not fits else "tight" if tight else "fits"
    return Verdict(fits, tight, f"{what}; {size(free.nbytes)} are free: {end}", hint if tight else "")


def size(nbytes: int) -> str:
    """`4.7 GB`: two digits are enough to decide by."""
    value = float(nbytes)
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "bytes" else f"{value:.0f} {unit}"


def free_memory(shared: str | None = None, *, proc: str = "/proc") -> Free:
    """What this process may still allocate: the smallest of the machine, its cgroups, and the tmpfs `shared` if given.

    Pages of files that were not used lately count as free: the kernel drops them first.
    """
    with open(f"{proc}/meminfo") as file:
        rows = dict(line.split(":", 1) for line in file)
    found = [Free(int(rows["MemAvailable"].split()[0]) * 1024, "the machine")]
    with contextlib.suppress(OSError, ValueError):
        found += _cgroups(proc)
    if shared is not None:
        found.append(free_disk(shared))
    return min(found)


def at(url: str, options: Mapping[str, Any], image_bytes: int, keep: int) -> Verdict | None:
    """Whether `keep` + 1 generations fit at `url`, those that lie there counted in. None: it is not a local folder."""
    place = Place(url, options)
    if not place.local:
        return None
    there = sum(1 for name in place.sizes() if name.startswith("step-"))
    return disk(image_bytes, max(keep + 1 - there, 1), free_disk(place.path()))


def free_disk(path: str) -> Free:
    """What this user may still write at `path`, or at the nearest folder above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    stat = os.statvfs(path)
    return Free(stat.f_bavail * stat.f_frsize, path)


def _cgroups(proc: str) -> Iterator[Free]:
    """What each memory cgroup around this process leaves: a limit may be set at any level of the tree."""
    with open(f"{proc}/self/cgroup") as file:
        groups = {names: path for _, names, path in (line.strip().split(":", 2) for line in file)}
    for kind, root, mounted in _mounts(proc):
        names = (names for names in groups if names == "" or "memory" in names.split(","))
        path = next((groups[name] for name in names if bool(name) == (kind == "cgroup")), root)
        below = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
        folder = os.path.normpath(f"{mounted}/{below}")
        while folder.startswith(mounted):
            yield from _rest(folder, *_CGROUP_FILES[kind])
            folder = os.path.dirname(folder)


def _mounts(proc: str) -> Iterator[tuple[str, str, str]]:
    """Kind, root and mount point of the trees that may limit memory."""
    with open(f"{proc}/self/mountinfo") as file:
        for line in file:
            left, right = line.split(" - ", 1)
            kind, _, options = right.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.strip().split(",")):
                _, _, _, root, mounted, *_ = left.split()
                yield kind, root, mounted


def _rest(folder: str, limit_name: str, used_name: str, cached_name: str) -> Iterator[Free]:
    with contextlib.suppress(OSError, ValueError):  # no limit is the word "max", and the root has no such files
        limit = int(_read(f"{folder}/{limit_name}"))
        rows = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
        used = int(_read(f"{folder}/{used_name}")) - int(rows.get(cached_name, 0))
        if limit < _NO_LIMIT:
            yield Free(max(limit - used, 0), f"cgroup {folder}")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
