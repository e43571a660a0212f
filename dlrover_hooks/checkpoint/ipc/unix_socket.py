"""Where a node's keeper is found: socket and lock file in a folder that only this user may enter. No torch.

The kernel limits a Unix socket's path to 107 bytes, and temporary folders on clusters have longer names. So sockets are
addressed through a descriptor of their folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_hooks.config import runtime_dir
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.host.socket_paths import short_path

SEND_S = 1
"""Seconds. Messages are small and a working keeper always reads: after a longer block it counts as dead."""


_NO_DESCRIPTORS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors with which a sandbox refuses SCM_RIGHTS."""


class Address(NamedTuple):
    """Paths of one (job, node)'s keeper."""

    socket: str
    lock: str

    @property
    def log(self) -> str:
        """The log of a keeper that a worker started."""
        return self.lock.removesuffix(".lock") + ".log"


def address(job: str, node: str) -> Address:
    """The file name is a hash of (job, node), so both may be any text."""
    name = hashlib.sha256(f"{len(job)}:{job}:{node}".encode()).hexdigest()[:20]
    base = os.path.join(runtime_dir(), f"keeper-{name}")
    return Address(f"{base}.sock", f"{base}.lock")


class KeeperSocket:
    """A keeper's socket and lock file in the runtime folder. `fd`: the locked file. `mend` recreates removed files."""

    def __init__(self, at: Address, fd: int) -> None:
        self.at, self._fd = at, fd
        self.listener = listen(at.socket)

    def mend(self) -> socket.socket | None:
        """A new listener if the socket file was removed. None: it exists, or another keeper has the lock.

        Raises:
            OSError: it cannot be created.
        """
        if os.path.exists(self.at.socket):
            return None
        os.makedirs(os.path.dirname(self.at.socket), mode=0o700, exist_ok=True)
        if not _is_file(self._fd, self.at.lock):
            fd = lock(self.at.lock)
            if fd is None:
                return None
            os.close(self._fd)
            self._fd = fd
        self.listener = listen(self.at.socket)
        return self.listener

    def remove(self) -> None:
        """Remove the keeper's files. Files of another keeper, created after ours were removed, stay."""
        if _is_file(self._fd, self.at.lock):
            for path in self.at:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def lock(path: str) -> int | None:
    """Lock the keeper's lock file: its descriptor; None if a keeper runs. The lock ends with the process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_file(fd, path):
            return fd
        os.close(fd)  # an ending keeper removed this file meanwhile: lock the current one


def _is_file(fd: int, path: str) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def listen(path: str) -> socket.socket:
    """A listener at `path` that only this user may connect to. The caller holds the lock."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as short:
        listener.bind(short)
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener


def dial(path: str) -> socket.socket | None:
    """A connection to the listener at `path`; sends fail after SEND_S. None: no listener, or its queue is full.

    The timeout is the kernel's SO_SNDTIMEO: it limits `connect` and `send` only; a reader may wait without limit.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
    try:
        with short_path(path) as short:
            connection.connect(short)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        connection.close()
        return None
    return connection


def send(connection: socket.socket, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
    """Send what the socket accepts. If the system refuses descriptors, send `data` alone, which names their paths.

    Returns the number of bytes sent. Raises BlockingIOError, and OSError if the connection is gone.
    """
    if fds:
        try:
            return socket.send_fds(connection, [data], list(fds))
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
    return connection.send(data)


def reach(at: tuple[str, int, int], flags: int = os.O_RDWR) -> int:
    """Open a file that another process of this user has open: `at` is a path under /proc, device and inode.

    Raises:
        KeeperAway: it cannot be opened, or it is another file.
    """
    path, device, inode = at
    hint = "the keeper and its trainers must be able to pass descriptors, or share a user and a process namespace"
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise KeeperAway(f"the memory at {path} cannot be opened: {error.strerror}", hint=hint) from error
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino, found.st_uid) != (device, inode, os.geteuid()):
        os.close(fd)
        raise KeeperAway(f"{path} is not the memory that was named", hint=hint)
    return fd


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, from the kernel."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end, from the kernel."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", data)


def welcome(uid: int) -> bool:
    """Only the keeper's own user may connect: the keeper hands out memory and writes files."""
    return uid == os.geteuid()
