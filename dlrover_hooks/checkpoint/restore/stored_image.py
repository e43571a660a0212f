"""Reads a rank's file in storage chunk by chunk where it is needed, and verifies each chunk. No torch.

The MANIFEST is not trusted: its contents are compared with the file before any memory is allocated.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import xxhash

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.state.safetensors_header import header_end, parse
from dlrover_hooks.checkpoint.storage.catalog import folder, shard_name
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder, failures
from dlrover_hooks.checkpoint.storage.stall_guard import Attempt, StallGuard
from dlrover_hooks.checkpoint.tensors.generation_images import Delivery, deliver_from_view
from dlrover_hooks.errors import Corrupt, StorageFailed
from dlrover_hooks.protocol import Manifest, ShardFile

RUN_CHUNKS = 32
"""A thread reads at most this many neighbouring chunks before it takes the next ones. The kernel reads ahead of each
thread: with runs of 4 chunks, and two threads in turn, 500 MB that were not in the page cache took 227 ms, with runs of
32 chunks 172 ms (medians of 12).
"""
REMOTE_BLOCK_BYTES = 4 * CHUNK_BYTES
"""How much fsspec reads at once."""
MOST_PIECES = 512
"""Buffers of one read; Linux allows 1024 (IOV_MAX)."""
THREADS = min(4, len(os.sched_getaffinity(0)))
READS = StallGuard()
"""For all reads of a restore: a read that receives no further byte for `stall_guard.STALL_S` is abandoned. A hard NFS
mount whose server is gone never reports an error."""


class StoredImage:
    """`rank`'s file of `manifest` in the tree at `place`.

    Raises:
        Corrupt: it differs from the MANIFEST, or is no image; names file, chunk and generation.
        StorageFailed: it cannot be read, or a read stalls.
    """

    def __init__(self, place: StorageFolder, manifest: Manifest, rank: int) -> None:
        self._place, self._generation = place, manifest.generation
        self._home = folder(manifest.generation)
        self._file = self._checked(next((one for one in manifest.files if one.rank == rank), None), rank)
        try:
            # pages are allocated only where written; private, since shared memory is slower to allocate and free
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, max(self._file.nbytes, 1), flags=flags)
        except OSError as error:
            raise StorageFailed(f"{self._name}: {self._file.nbytes} bytes do not fit into memory") from error
        self.view = memoryview(self._memory)[: self._file.nbytes]
        self._there: set[int] = set()
        try:
            self.need([(0, 8)])
            end = header_end(self.view, self._file.nbytes)
            self.need([(0, end)])
            self.header = parse(self.view[:end], self._file.nbytes)
        except Corrupt as error:
            self.close()
            if error.message.startswith(self._name):
                raise
            raise Corrupt(f"{self._name} of {self._generation}: {error.message}") from error
        except BaseException:
            self.close()
            raise

    def _checked(self, file: ShardFile | None, rank: int) -> ShardFile:
        home = self._place.path(self._home)
        if file is None or file.name != shard_name(rank):
            other = f", but {file.name!r}" if file else ""
            raise Corrupt(f"{home}: {self._generation} has no file of rank {rank}{other}")
        found = READS.run(lambda _: self._place.sizes(self._home), f"list {home}").get(file.name)
        where = f"{home}/{file.name}"  # contains step and attempt
        if found is None:
            raise Corrupt(f"{where}: there is no such file")
        if found != file.nbytes:
            raise Corrupt(f"{where}: expected {file.nbytes} bytes, found {found}")
        if file.chunk_bytes != CHUNK_BYTES or len(file.chunks) != -(-file.nbytes // CHUNK_BYTES):
            raise Corrupt(
                f"{where}: {len(file.chunks)} hashes of {file.chunk_bytes} bytes each "
                f"are not those of {file.nbytes} bytes in chunks of {CHUNK_BYTES}"
            )
        return file

    @property
    def _name(self) -> str:
        return self._place.path(f"{self._home}/{self._file.name}")

    def need(self, spans: Iterable[tuple[int, int]]) -> None:
        missing = sorted(self._chunks_of(spans) - self._there)
        self._read(missing, [], THREADS, None)
        self._there.update(missing)

    def deliver(self, moves: Sequence[Delivery], copier: Copier, memory: Any) -> None:
        """Read directly to the addresses, without a second copy and without memory of this image."""
        direct, copied = list[Delivery](), list[Delivery]()
        for move in (one for one in moves if one[0] < one[1]):  # chunks that were read before are copied
            (direct if self._chunks_of([move[:2]]).isdisjoint(self._there) else copied).append(move)
        direct.sort()
        self._read(sorted(self._chunks_of(move[:2] for move in direct)), direct, copier.threads, memory)
        deliver_from_view(self, copied, copier)

    def _chunks_of(self, spans: Iterable[tuple[int, int]]) -> set[int]:
        return {
            chunk
            for start, stop in spans
            for chunk in range(start // CHUNK_BYTES, -(-min(stop, self._file.nbytes) // CHUNK_BYTES))
        }

    def _read(self, chunks: Sequence[int], moves: Sequence[Delivery], threads: int, memory: Any) -> None:
        """Read `chunks` with up to `threads` threads and verify each while it is in the CPU caches.

        Parts inside of `moves` (sorted, disjoint) go to their addresses, the rest into `view`. `memory` owns those
        addresses: a thread that hangs in the kernel may still write there, so `memory` is kept as long as the thread
        lives.
        """
        if chunks:
            work = functools.partial(self._read_all, memory, list(chunks), moves, threads)
            READS.run(work, f"read {self._name} of {self._generation}")

    def _read_all(
        self, memory: Any, chunks: list[int], moves: Sequence[Delivery], threads: int, attempt: Attempt
    ) -> None:
        del memory  # the caller's frame has it until this returns
        shares = list(_runs(chunks, min(RUN_CHUNKS, -(-len(chunks) // threads))))
        runs = iter(shares)
        failed: list[BaseException] = []

        def work() -> None:
            try:
                with failures(f"read {self._name}"), self._source() as read:
                    for first, count in runs:  # the GIL protects the iterator: each run goes to one thread
                        for chunk in range(first, first + count):
                            if failed or attempt.given_up:
                                return
                            pieces = self._pieces(chunk, moves)
                            read(chunk * CHUNK_BYTES, pieces)
                            self._verify(chunk, pieces)
                            attempt.moved = time.monotonic()
            except BaseException as error:
                failed.append(error)

        helpers = [
            threading.Thread(target=work, name="dlrover-hooks-read", daemon=True)
            for _ in range(min(threads, len(shares)) - 1 if self._place.local else 0)
        ]
        started = list[threading.Thread]()
        try:
            for helper in helpers:
                with contextlib.suppress(RuntimeError):  # no more threads are allowed: the running ones do all
                    helper.start()
                    started.append(helper)
            work()
        finally:
            for helper in started:
                helper.join()
        if failed:
            raise failed[0]

    @contextlib.contextmanager
    def _source(self) -> Iterator[Callable[[int, list[memoryview]], None]]:
        """`read(start, pieces)` fills the pieces with the bytes from `start` on, up to the end of the file."""
        if self._place.local:
            fd = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield functools.partial(_read_at, fd)
            finally:
                os.close(fd)
            return
        with self._place.fs.open(self._name, "rb", block_size=REMOTE_BLOCK_BYTES) as file:
            yield functools.partial(_read_from, file)

    def _pieces(self, chunk: int, moves: Sequence[Delivery]) -> list[memoryview]:
        """The memory for the bytes of `chunk`, in order."""
        at, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self._file.nbytes)
        pieces = list[memoryview]()
        for start, stop, address in moves[bisect.bisect_right(moves, at, key=lambda move: move[1]) :]:
            if start >= end:
                break
            begin, until = max(start, at), min(stop, end)
            if at < begin:
                pieces.append(self.view[at:begin])
            where = (ctypes.c_uint8 * (until - begin)).from_address(address + begin - start)
            pieces.append(memoryview(where).cast("B"))
            at = until
        if at < end:
            pieces.append(self.view[at:end])
        return pieces

    def _verify(self, chunk: int, pieces: Iterable[memoryview]) -> None:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        if digest.hexdigest() != self._file.chunks[chunk]:
            raise Corrupt(f"{self._name}: chunk {chunk} does not match its hash")

    def check(self) -> None:
        """Nothing to check: the memory is this process's own copy."""

    def close(self) -> None:
        self.view.release()
        with contextlib.suppress(BufferError):  # a traceback may hold a view: the memory is freed with it
            self._memory.close()


def _read_at(fd: int, start: int, pieces: list[memoryview]) -> None:
    left = pieces
    while left and (got := os.preadv(fd, left[:MOST_PIECES], start)):
        start += got
        while left and got >= len(left[0]):
            got -= len(left[0])
            left = left[1:]
        if got:
            left = [left[0][got:], *left[1:]]


def _read_from(file: Any, start: int, pieces: list[memoryview]) -> None:
    file.seek(start)
    for piece in pieces:
        while len(piece) and (got := file.readinto(piece)):
            piece = piece[got:]


def _runs(chunks: list[int], most: int) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbouring chunks, at most `most` each."""
    first, count = chunks[0], 1
    for chunk in chunks[1:]:
        if chunk == first + count and count < most:
            count += 1
        else:
            yield first, count
            first, count = chunk, 1
    yield first, count
