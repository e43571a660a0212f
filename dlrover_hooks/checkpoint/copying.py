"""Bytes from here to there: plain threads that call `memcpy` without the GIL. No torch, no numpy.

Torch's own pool costs ten times as much when cores are busy (measured), so no torch operation runs for a copy.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable

Move = tuple[int, int, int]
"""Destination address, source address, bytes."""

PIECE_BYTES = 4 << 20
_ALONE_BYTES = 1 << 20
_libc = ctypes.CDLL(None)
_memcpy = _libc.memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


class Copier:
    """Copies with up to `threads` threads, the caller's among them. They live for one copy; any thread may call."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(4, len(os.sched_getaffinity(0)))

    def copy(self, moves: Iterable[Move]) -> None:
        """Do all `moves`, the bytes shared out evenly among the threads."""
        shares = _shares(moves, self.threads)
        helpers = [threading.Thread(target=_run, args=(share,), name="dlrover-hooks-copy") for share in shares[1:]]
        for helper in helpers:
            helper.start()
        if shares:
            _run(shares[0])
        for helper in helpers:
            helper.join()


def _shares(moves: Iterable[Move], threads: int) -> list[list[Move]]:
    """`moves` in pieces of at most 4 MiB, in at most `threads` runs of about equal bytes."""
    pieces = [
        (to + at, source + at, min(PIECE_BYTES, size - at))
        for to, source, size in moves
        for at in range(0, size, PIECE_BYTES)
    ]
    total = sum(size for _, _, size in pieces)
    count = 1 if total < _ALONE_BYTES else threads
    shares: list[list[Move]] = [[] for _ in range(count)]
    done = 0
    for piece in pieces:
        shares[min(done * count // total, count - 1)].append(piece)
        done += piece[2]
    return [share for share in shares if share]


def _run(moves: list[Move]) -> None:
    for to, source, size in moves:
        _memcpy(to, source, size)
