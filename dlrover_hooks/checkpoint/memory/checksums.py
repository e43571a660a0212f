"""Hashes of images and files: xxh3-64 of each 4 MiB chunk, to detect and locate damage."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import xxhash

try:
    from dlrover_hooks.checkpoint.memory import _copy
except ImportError:  # installed without a compiler
    _copy = None

CHUNK_BYTES = 4 << 20
_ALONE_BYTES = 16 * CHUNK_BYTES
"""Below this size threads cost more than they save."""
_LEAP_BYTES = 128 << 10
"""Bytes read past the caches and hashed at a time. They fit into a core's private caches."""


def cut(view: memoryview, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """`view` in pieces of `size` bytes. The last one may be shorter; an empty view has none."""
    for start in range(0, len(view), size):
        yield view[start : start + size]


def digests(view: memoryview, threads: int = 1) -> tuple[str, ...]:
    """One hex digest per chunk of `view`."""
    if threads == 1 or len(view) < _ALONE_BYTES:
        return tuple(xxhash.xxh3_64_hexdigest(piece) for piece in cut(view))
    with ThreadPoolExecutor(threads, "hash") as pool:  # hashing releases the GIL
        return tuple(pool.map(xxhash.xxh3_64_hexdigest, cut(view)))


def digests_beside(view: memoryview) -> tuple[str, ...]:
    """As `digests`, but bypasses the caches to leave them to other threads. Costs half as much CPU again (0.05 s/GB).

    Measured beside training steps: each 500 MB hashed in the other way cost 2.2 ms of the trainer's core.
    """
    fetch = getattr(_copy, "fetch", None)
    if fetch is None or view.readonly:
        return digests(view)
    room = bytearray(_LEAP_BYTES)
    leap, to = memoryview(room), _address(room)

    def digest(piece: memoryview) -> str:
        hasher, start = xxhash.xxh3_64(), _address(piece)
        for at in range(0, len(piece), _LEAP_BYTES):
            size = min(_LEAP_BYTES, len(piece) - at)
            fetch(to, start + at, size)
            hasher.update(leap[:size])
        return hasher.hexdigest()

    return tuple(map(digest, cut(view)))


def _address(data: bytearray | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def damaged(view: memoryview, expected: tuple[str, ...], threads: int = 1) -> int | None:
    """Index of the first chunk of `view` that does not match `expected`; None if all match."""
    return first_difference(digests(view, threads), expected)


def first_difference(found: tuple[str, ...], expected: tuple[str, ...]) -> int | None:
    """Index of the first chunk that differs; None if all are equal."""
    if found == expected:
        return None
    for index, (is_, should) in enumerate(zip(found, expected, strict=False)):
        if is_ != should:
            return index
    return min(len(found), len(expected))


def inside(ranges: Iterable[tuple[int, int]], nbytes: int) -> frozenset[int]:
    """The chunks of an image of `nbytes` that lie entirely in one of `ranges` [start, stop)."""
    found: set[int] = set()
    for start, stop in ranges:
        end = -(-nbytes // CHUNK_BYTES) if stop >= nbytes else stop // CHUNK_BYTES
        found.update(range(-(-start // CHUNK_BYTES), end))
    return frozenset(found)


class ChecksumStream:
    """Chunk digests of a stream of pieces of any size. One thread at a time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._open = xxhash.xxh3_64()
        self._done: list[str] = []

    def split(self, piece: memoryview) -> Iterator[memoryview]:
        """Yield `piece` cut at chunk boundaries; each part is hashed before it is yielded."""
        while len(piece):
            part = piece[: CHUNK_BYTES - self.nbytes % CHUNK_BYTES]
            self._open.update(part)
            self.nbytes += len(part)
            if self.nbytes % CHUNK_BYTES == 0:
                self._close()
            yield part
            piece = piece[len(part) :]

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open.reset()

    def digests(self) -> tuple[str, ...]:
        """All chunks so far; the last one may be short."""
        if self.nbytes % CHUNK_BYTES:
            return (*self._done, self._open.hexdigest())
        return tuple(self._done)
