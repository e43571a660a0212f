"""Which of a machine's NVIDIA GPUs CUDA shows a process, and which of these is a worker's own.

The rules are those of `CUDA_VISIBLE_DEVICES` in NVIDIA's CUDA programming guide, "CUDA environment variables".
"""

from __future__ import annotations

from collections.abc import Sequence


def visible(names: str | None, uuids: Sequence[str]) -> tuple[str, ...]:
    """The devices that CUDA shows, in its order: UUIDs of GPUs, and names of MIG instances as they were given.

    names: CUDA_VISIBLE_DEVICES, None if it is not set. An index, a UUID and the beginning of a UUID are looked up in
    `uuids`, those of the machine's GPUs by index. A device that is not there hides all that follow it, and a device
    that is listed twice hides all. MIG instances are not looked up.
    """
    if names is None:
        return tuple(uuids)
    found: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        device = _device(name, uuids)
        if device is None:
            break
        found.append(device)
    return tuple(found) if len(set(found)) == len(found) else ()


def _device(name: str, uuids: Sequence[str]) -> str | None:
    if name.isascii() and name.isdigit():
        return uuids[int(name)] if int(name) < len(uuids) else None
    if name.startswith("MIG-"):
        return name
    matching = [uuid for uuid in uuids if uuid.startswith(name)] if name.startswith("GPU-") else []
    return matching[0] if len(matching) == 1 else None


def own(shown: Sequence[str], local_rank: int) -> str | None:
    """The device of the worker with this local rank; None: none is visible.

    If all are shown to all workers of a node, each one takes that of its local rank. Otherwise a launcher has given
    each one its own: then it is the first.
    """
    if local_rank < len(shown):
        return shown[local_rank]
    return shown[0] if shown else None
