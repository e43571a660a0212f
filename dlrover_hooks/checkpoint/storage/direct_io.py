"""Writes a local file past the page cache, where the file system allows it (O_DIRECT).

A keeper's page-aligned image is written directly from shared memory. Measured: 0.02 s of CPU per GB, against 0.14 s for
write and fsync and up to 1 s through a cold page cache. The trainer's cached data set stays in memory. A file system
that refuses O_DIRECT (EINVAL at `open` or at the first write: some network mounts, tmpfs of older kernels) is silently
written through the cache, and synced regularly, so that there is no long sync at the end. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable

BLOCK = 4096
WRITE_BYTES = 8 << 20
SYNC_BYTES = 64 << 20


def write(path: str, pieces: Iterable[memoryview]) -> None:
    """Create file `path` from `pieces`; its bytes are on the disk afterwards. Any thread.

    Raises:
        OSError: it could not be written completely; the caller has to remove the partial file.
    """
    fd = _open(path)
    try:
        out = _Aligned(fd)
        for piece in pieces:
            out.add(piece)
        out.end()
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # any other error is raised by the second open
        return os.open(path, flags | os.O_DIRECT, 0o666)
    return os.open(path, flags, 0o666)


class _Aligned:
    """Writes complete blocks from page-aligned memory to `fd`. Other memory goes through a page-aligned buffer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = memoryview(mmap.mmap(-1, WRITE_BYTES))
        self._filled = self._nbytes = self._unsynced = 0
        self._cached = not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT

    def add(self, piece: memoryview) -> None:
        self._nbytes += len(piece)
        if not self._filled and _aligned(piece):
            whole = len(piece) // BLOCK * BLOCK
            self._write(piece[:whole])
            piece = piece[whole:]
        while len(piece):
            count = min(len(piece), WRITE_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = piece[:count]
            self._filled += count
            piece = piece[count:]
            if self._filled == WRITE_BYTES:
                self._write(self._buffer)
                self._filled = 0

    def end(self) -> None:
        """Write the rest, padded to a block, and truncate the file to its length."""
        padded = -(-self._filled // BLOCK) * BLOCK
        self._buffer[self._filled : padded] = bytes(padded - self._filled)
        self._write(self._buffer[:padded])
        os.ftruncate(self._fd, self._nbytes)

    def _write(self, piece: memoryview) -> None:
        while len(piece):
            try:
                done = os.write(self._fd, piece[:WRITE_BYTES])
            except OSError as error:
                if error.errno != errno.EINVAL or self._cached:
                    raise
                self._go_through_cache()
                continue
            piece = piece[done:]
            self._unsynced += done
            if self._cached and self._unsynced >= SYNC_BYTES:
                os.fdatasync(self._fd)
                self._unsynced = 0

    def _go_through_cache(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._cached = True


def _aligned(piece: memoryview) -> bool:
    if piece.readonly or len(piece) < BLOCK:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(piece)) % BLOCK == 0
