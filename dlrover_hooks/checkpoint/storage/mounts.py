"""Checks that a local tree is still on the same file system. No torch.

A lost mount leaves its mount point: an empty folder on the node's own disk. Writes succeed there, fill that disk, and
are hidden once the mount is back. So each process remembers the device of a tree, and the tree's name, which is stored
in the tree itself: a device may have another number when it is mounted again.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import NamedTuple

from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder, failures
from dlrover_hooks.errors import StorageFailed

LOCK = ".owner.lock"
"""The file in a tree that its owner locks. It contains the tree's name."""
_NAME_BYTES = 64
_HINT = (
    "mount it again: what is in memory is written then. A tree that was moved on purpose starts over (--fresh), or "
    "takes another `save_to`"
)


class Device(NamedTuple):
    """The file system of a tree. `name`: "" if the tree has none, because it was never claimed."""

    number: int
    name: str


_seen: dict[str, Device] = {}
"""By root, of this process."""


def demand_same(place: StorageFolder) -> None:
    """To be called before `place` is written. Does nothing for remote ones.

    Raises:
        StorageFailed: the tree is on another file system than when this process first checked.
    """
    if not place.local:
        return
    with failures(f"look at {place.url}"):
        now = Device(_number(place.root), _name(place.root))
    before = _seen.get(place.root)
    if before is not None and before.number != now.number and not (before.name and before.name == now.name):
        raise StorageFailed(
            f"{place.url} is on another file system than before: its mount is gone, or another one lies over it. "
            "Nothing is written there",
            hint=_HINT,
        )
    _seen[place.root] = now if now.name or before is None else Device(now.number, before.name)


def forget() -> None:
    """Forget all devices: a fresh run begins, and its tree may be on any file system."""
    _seen.clear()


def give_name(fd: int) -> None:
    """Name the tree whose lock file is `fd`, locked by the caller, unless it has a name. Raises OSError."""
    if not os.pread(fd, 1, 0):
        os.pwrite(fd, uuid.uuid4().hex.encode(), 0)
        os.fsync(fd)


def _number(root: str) -> int:
    """The device of folder `root`, or of its nearest existing parent."""
    while True:
        try:
            return os.stat(root).st_dev
        except FileNotFoundError:
            root = os.path.dirname(root)


def _name(root: str) -> str:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        fd = os.open(f"{root}/{LOCK}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, _NAME_BYTES).decode("ascii", "replace")
        finally:
            os.close(fd)
    return ""
