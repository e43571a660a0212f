"""Reads persisted generations again and compares them with their hashes, chunk by chunk, in little memory. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import xxhash

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.storage.catalog import (
    FINISHED,
    FRESH,
    GIVEN_UP,
    LATEST,
    AbandonedRuns,
    Finished,
    FreshStart,
    Latest,
    Listed,
    Note,
    content,
    decode,
    load,
)
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder, failures
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.protocol import ShardFile

_NOTES: dict[str, type[Note]] = {LATEST: Latest, FINISHED: Finished, FRESH: FreshStart, GIVEN_UP: AbandonedRuns}


def tree_faults(place: StorageFolder, rows: Collection[Listed]) -> Iterator[str]:
    """One line for each damaged file besides the generations `rows`, beginning with its name."""
    for name, kind in _NOTES.items():
        if (data := content(place, name)) is not None and decode(data, kind) is None:
            yield f"{name}: cannot be read, or does not match its hash"
    latest = load(place, LATEST, Latest)
    whole = (one.manifest.generation for one in rows if one.manifest is not None and one.fault is None)
    if latest is not None and latest.generation not in whole:
        yield f"{LATEST}: names {latest.generation}, which is not there or not whole"


def faults(place: StorageFolder, one: Listed, advance: Callable[[int], None]) -> Iterator[str]:
    """One line for each damage of a generation, beginning with its folder. `advance` receives the bytes read."""
    if one.fault is not None or one.manifest is None:
        yield f"{one.folder}: {one.fault}"
        return
    for file in one.manifest.files:
        name = f"{one.folder}/{file.name}"
        try:
            for chunk in damaged_chunks(place, name, file, advance):
                yield f"{name}: chunk {chunk} does not match its hash"
        except StorageFailed as error:
            yield f"{name}: {error.message}"


def damaged_chunks(place: StorageFolder, name: str, file: ShardFile, advance: Callable[[int], None]) -> Iterator[int]:
    """Indexes of the chunks of file `name` that do not match.

    Raises:
        StorageFailed: the file cannot be read, or was hashed in another way.
    """
    if file.chunk_bytes != CHUNK_BYTES or len(file.chunks) != -(-file.nbytes // CHUNK_BYTES):
        raise StorageFailed(f"{len(file.chunks)} hashes of {file.chunk_bytes} bytes each are not those of the file")
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with failures(f"read {place.path(name)}"), place.fs.open(place.path(name), "rb", block_size=CHUNK_BYTES) as source:
        for index, expected in enumerate(file.chunks):
            got = 0
            while got < CHUNK_BYTES and (count := source.readinto(buffer[got:])):
                got += count
            advance(got)
            if xxhash.xxh3_64_hexdigest(buffer[:got]) != expected:
                yield index
