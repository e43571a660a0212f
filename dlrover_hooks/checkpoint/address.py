"""Where a node's keeper is found: socket and lock in a folder that only this user may enter. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import struct
import tempfile
from typing import NamedTuple

from dlrover_hooks.errors import KeeperAway

_LONGEST = 90  # a unix socket's path has 108 bytes


class Address(NamedTuple):
    """Paths of one (job, node)'s keeper."""

    socket: str
    lock: str


def runtime_folder() -> str:
    """The user's runtime folder, mode 0700, made if need be.

    Raises:
        KeeperAway: somebody else owns that name.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base) and len(base) < _LONGEST - 40 and os.stat(base).st_uid == os.getuid():
        path = os.path.join(base, "dlrover-hooks")
    else:
        path = os.path.join(tempfile.gettempdir(), f"dlrover-hooks-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise KeeperAway(
            f"{path} is not this user's own folder with mode 0700", hint="remove it, or set XDG_RUNTIME_DIR"
        )
    return path


def address(job: str, node: str) -> Address:
    """The name is a hash of (job, node): any text will do as either."""
    name = hashlib.sha256(f"{len(job)}:{job}:{node}".encode()).hexdigest()[:20]
    base = os.path.join(runtime_folder(), f"keeper-{name}")
    return Address(f"{base}.sock", f"{base}.lock")


def lock(path: str) -> int | None:
    """The keeper's lock file, locked: its descriptor; None if a keeper lives. Ends with the process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_file(fd, path):
            return fd
        os.close(fd)  # an ending keeper removed this file while we waited: lock the one that is there now


def _is_file(fd: int, path: str) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel says."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", data)[1]


def welcome(uid: int) -> bool:
    """Only the keeper's own user may speak to it: it hands out memory and writes files."""
    return uid == os.geteuid()
