"""Whether there is enough memory for the slots of a node's workers, and disk for the kept generations. No torch.

`memory` and `disk` decide from numbers alone and return a line for the user; the other functions read those numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlrover_hooks.checkpoint.memory.segment import SLOTS
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.host.memory_limit import Free, free as memory_of_machine

TIGHT = 0.9
"""It is tight if more than this share of the free space is needed."""


class CapacityReport(NamedTuple):
    """`line` states the required and the free space; `hint` what to do if it is tight or does not fit."""

    fits: bool
    tight: bool
    line: str
    hint: str = ""


def memory(slot_bytes: int, workers: int, free: Free, slots: int = SLOTS) -> CapacityReport:
    """Whether the slots of `workers` more workers fit into `free`."""
    need = slots * slot_bytes * workers
    each = f" for each of {workers} workers" if workers > 1 else ""
    hint = (
        f"in-memory checkpoints need {SLOTS} times the state's size per worker: start fewer workers on this node, or "
        f"give it more memory ({free.where} sets the limit)"
    )
    what = f"{slots} slot{'s' * (slots > 1)} of {size(slot_bytes)}{each} need"
    return _judge(f"{what} {size(need)}", need, free, hint)


def disk(image_bytes: int, missing: int, free: Free) -> CapacityReport:
    """Whether `missing` more generations of `image_bytes` fit at `save_to`: `keep` and the one being written."""
    need = image_bytes * missing
    each = f"{missing} more generations of {size(image_bytes)}"
    hint = f"free some space at {free.where}, lower `keep`, or choose another `save_to`"
    return _judge(f"{each} at {free.where} need {size(need)}", need, free, hint)


def _judge(what: str, need: int, free: Free, hint: str) -> CapacityReport:
    fits, tight = need <= free.nbytes, need > TIGHT * free.nbytes
    end = "does not fit" if not fits else "tight" if tight else "fits"
    return CapacityReport(fits, tight, f"{what}; {size(free.nbytes)} are free: {end}", hint if tight else "")


def size(nbytes: int) -> str:
    """`4.7 GB`: two digits are enough for a decision."""
    value = float(nbytes)
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "bytes" else f"{value:.0f} {unit}"


def free_memory(shared: str | None = None, *, proc: str = "/proc") -> Free:
    """What this process may still allocate: `memory_limit.free`, and the tmpfs `shared` if given."""
    found = memory_of_machine(proc)
    return found if shared is None else min(found, free_disk(shared))


def at(url: str, options: Mapping[str, Any], image_bytes: int, keep: int) -> CapacityReport | None:
    """Whether `keep` + 1 generations fit at `url`, counting those already there. None: it is not a local folder."""
    place = StorageFolder(url, options)
    if not place.local:
        return None
    there = sum(1 for name in place.sizes() if name.startswith("step-"))
    return disk(image_bytes, max(keep + 1 - there, 1), free_disk(place.path()))


def free_disk(path: str) -> Free:
    """What this user may still write at `path`, or at its nearest existing parent."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    stat = os.statvfs(path)
    return Free(stat.f_bavail * stat.f_frsize, path)
