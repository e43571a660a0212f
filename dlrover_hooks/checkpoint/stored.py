"""A rank's file in storage, read chunk by chunk where it is needed; each chunk is verified as it comes. No torch.

The MANIFEST may come from anybody: what it claims is compared with the file before any memory is taken.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator

import xxhash

from dlrover_hooks.checkpoint.catalog import folder, shard_name
from dlrover_hooks.checkpoint.chunks import CHUNK_BYTES
from dlrover_hooks.checkpoint.header import header_end, parse
from dlrover_hooks.checkpoint.place import Place, failures
from dlrover_hooks.errors import Corrupt, StorageFailed
from dlrover_hooks.protocol import Manifest, ShardFile

RUN_CHUNKS = 16
"""At most so many neighbouring chunks are read in one go."""


class StoredImage:
    """`rank`'s file of `manifest` in the tree at `place`.

    Raises:
        Corrupt: it is not what the MANIFEST says, or no image; names file, chunk and generation.
        StorageFailed: it cannot be read.
    """

    def __init__(self, place: Place, manifest: Manifest, rank: int) -> None:
        self._place, self._generation = place, manifest.generation
        self._home = folder(manifest.generation)
        self._file = self._checked(next((one for one in manifest.files if one.rank == rank), None), rank)
        try:
            self._memory = mmap.mmap(-1, max(self._file.nbytes, 1))  # takes memory only where it is written
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
        found = self._place.sizes(self._home).get(file.name)
        where = f"{home}/{file.name}"  # names step and attempt, too
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
        wanted = {
            chunk
            for start, stop in spans
            for chunk in range(start // CHUNK_BYTES, -(-min(stop, self._file.nbytes) // CHUNK_BYTES))
        }
        missing = sorted(wanted - self._there)
        if not missing:
            return
        with failures(f"read {self._name}"), self._place.fs.open(self._name, "rb", block_size=CHUNK_BYTES) as file:
            for first, count in _runs(missing):
                start = first * CHUNK_BYTES
                target = self.view[start : start + count * CHUNK_BYTES]
                file.seek(start)
                while len(target) and (got := file.readinto(target)):
                    target = target[got:]
        for chunk in missing:
            self._verify(chunk)
        self._there.update(missing)

    def _verify(self, chunk: int) -> None:
        piece = self.view[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        if xxhash.xxh3_64_hexdigest(piece) != self._file.chunks[chunk]:
            raise Corrupt(f"{self._name}: chunk {chunk} does not match its hash")

    def check(self) -> None:
        """It is this process's own copy."""

    def close(self) -> None:
        self.view.release()
        with contextlib.suppress(BufferError):  # a traceback may hold a view: the memory goes with it
            self._memory.close()


def _runs(chunks: list[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbours."""
    first, count = chunks[0], 1
    for chunk in chunks[1:]:
        if chunk == first + count and count < RUN_CHUNKS:
            count += 1
        else:
            yield first, count
            first, count = chunk, 1
    yield first, count
