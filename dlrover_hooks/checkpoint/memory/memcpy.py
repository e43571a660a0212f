"""Memory copies by plain threads without the GIL. No torch.

No torch operation runs for a copy: torch's own thread pool costs ten times as much on busy cores (measured). The C
helper (`_copy.c`) is built if there is a compiler; otherwise calls of `memcpy` do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

try:
    from dlrover_hooks.checkpoint.memory import _copy
except ImportError:  # installed without a compiler
    _copy = None

Move = tuple[int, int, int]
"""Destination address, source address, bytes."""

PIECE_BYTES = 4 << 20
_ALONE_BYTES = 1 << 20
_TURNS = 8
"""Shares per thread, so that a slower or delayed thread takes fewer."""
_libc = ctypes.CDLL(None)
_memcpy = _libc.memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
_Words = np.ndarray[Any, np.dtype[np.uint64]]


def place_of(view: memoryview) -> int:
    """Address of the first byte of `view`."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


class Pieces:
    """Destinations that are filled repeatedly, cut into pieces once.

    Args:
        offsets: begin of each destination, relative to a base that is given later.
        sizes: their bytes.
        piece_bytes: maximum size of a piece.
    """

    def __init__(
        self, offsets: Sequence[int] | _Words, sizes: Sequence[int] | _Words, piece_bytes: int = PIECE_BYTES
    ) -> None:
        lengths = np.asarray(sizes, np.uint64)
        counts = (-(-lengths.astype(np.int64) // piece_bytes)).astype(np.intp)
        self.of = np.repeat(np.arange(len(counts)), counts)
        """By piece, the index of its destination."""
        first = np.cumsum(counts) - counts
        self.at = ((np.arange(len(self.of)) - first[self.of]) * piece_bytes).astype(np.uint64)
        self.offsets: _Words = np.asarray(offsets, np.uint64)[self.of] + self.at
        self.sizes: _Words = np.minimum(lengths[self.of] - self.at, np.uint64(piece_bytes))
        self.ends = np.cumsum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all destinations."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def shares(self, threads: int) -> list[tuple[int, int]]:
        """Ranges of pieces (begin, end) with about the same number of bytes, at most `threads`."""
        count = 1 if self.nbytes < _ALONE_BYTES else threads
        borders = np.searchsorted(self.ends, [self.nbytes * i // count for i in range(1, count)], "left") + 1
        edges = [0, *borders.tolist(), len(self.ends)]
        return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


class Copier:
    """Copies with up to `threads` threads, including the caller's. They end with each copy; any thread may call.

    `native`: use the C helper; None: if it is installed.
    """

    def __init__(self, threads: int | None = None, *, native: bool | None = None) -> None:
        self.threads = threads or min(4, len(os.sched_getaffinity(0)))
        self.native = _copy is not None if native is None else native

    def copy(self, moves: Iterable[Move]) -> None:
        """Do all `moves`, divided among the threads."""
        targets, sources, sizes = zip(*moves, strict=True) if (moves := list(moves)) else ((), (), ())
        self.fill(Pieces(targets, sizes), 0, sources)

    def reader(self, pieces: Pieces, base: int, froms: _Words) -> Callable[[], None]:
        """A function that fills all `pieces` from `base` on, in the calling thread only; `froms[i]`: source of piece i.

        For small copies that are repeated. The caller keeps `pieces`, `froms` and the memory at `base` alive.
        """
        count = len(pieces.ends)
        if not self.native:
            return functools.partial(_run, pieces, base, froms, [(0, count)])
        taken = np.zeros(1, np.uint64)
        work = _native(pieces, base, froms, [(0, count)], taken)

        def read() -> None:
            taken[0] = 0
            work()

        return read

    def fill(
        self,
        pieces: Pieces,
        base: int,
        sources: Sequence[int] | _Words,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill all `pieces` from `base` on; `sources[i]` is the source address of destination i.

        The caller's thread first runs `meanwhile` while the others already copy. Raises what it raises, and what any
        of the threads raises: a share that was not copied must not count as copied.
        """
        froms: _Words = np.asarray(sources, np.uint64)[pieces.of] + pieces.at
        shares = pieces.shares(1 if self.threads == 1 else self.threads * _TURNS)
        if self.native:
            work = _native(pieces, base, froms, shares, np.zeros(1, np.uint64))
        else:
            work = functools.partial(_run, pieces, base, froms, iter(shares))
        count = min(self.threads, len(shares))
        helpers, failed = list[threading.Thread](), list[BaseException]()

        def help_out() -> None:
            try:
                work()
            except BaseException as error:  # raised on the caller's thread
                failed.append(error)

        try:
            for _ in range(count - 1):
                helper = threading.Thread(target=help_out, name="dlrover-hooks-copy")
                with contextlib.suppress(RuntimeError):  # the limit of threads is reached: those that run do all
                    helper.start()
                    helpers.append(helper)
            meanwhile()
            work()
        finally:
            for helper in helpers:
                helper.join()
        if failed:
            raise failed[0]


def _native(
    pieces: Pieces, base: int, froms: _Words, shares: Sequence[tuple[int, int]], taken: _Words
) -> Callable[[], None]:
    """A function that copies shares until none is left; `taken` counts them. Any number of threads may call it."""
    assert _copy is not None, "the C helper is not installed"
    edges = np.asarray([0, *(end for _, end in shares)], np.uint64)
    kept = (pieces.offsets, froms, pieces.sizes, edges, taken)
    to, source, size, edge, count = (int(words.ctypes.data) for words in kept)
    copy = functools.partial(_copy.copy, base, to, source, size, edge, len(shares), count)

    def work(kept: Any = kept) -> None:
        copy()

    return work


def _run(pieces: Pieces, base: int, froms: _Words, left: Iterable[tuple[int, int]]) -> None:
    for begin, end in left:  # each share goes to one thread: an iterator advances under the GIL
        rows = (words[begin:end].tolist() for words in (pieces.offsets, froms, pieces.sizes))
        for to, source, size in zip(*rows, strict=True):
            _memcpy(base + to, source, size)
