"""What a `ShardDataset` can lend out: rows of a table, records of text, files, offsets of a stream.

A *bounded* source numbers its records 0..n-1 and is shuffled by number; a *stream* has named partitions of offsets and
keeps their order. Sources are read in DataLoader workers, so they can be pickled, and open nothing before reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import xxhash

from dlrover_hooks.data.leased.text_records import TextRecords
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Partition

__all__ = ["Files", "OffsetReader", "RecordSource", "Stream", "Table", "TextRecords", "as_source"]


@runtime_checkable
class RecordSource(Protocol):
    """A bounded source. A record that cannot be read raises; it is then retried, and finally quarantined."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The records with these numbers, in that order."""
        ...

    def fingerprint(self) -> str:
        """Everything that determines which record a number means. The same on every worker and after a restart."""
        ...

    def place(self, index: int) -> str:
        """The location of record `index`, for the user to find it."""
        ...


class OffsetReader(Protocol):
    """The reader that a user passes to `Stream`."""

    def read(self, partition: str, lo: int, hi: int) -> Sequence[Any]:
        """The records at offsets [lo, hi), waiting for them if needed; fewer only if the partition ends for good.

        May be called again for the same offsets. Called in DataLoader workers.
        """
        ...


class Table:
    """A map-style dataset, or the numbers 0..n-1 themselves: `Table(1000)`. Row i is `rows[i]`."""

    def __init__(self, rows: Any) -> None:
        self.rows = range(rows) if isinstance(rows, int) else rows
        self._many = getattr(self.rows, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        if self._many is not None:
            return self._many(indices)
        rows = self.rows
        return [rows[index] for index in indices]

    def fingerprint(self) -> str:
        """Its length: nothing else of a map-style dataset can be compared."""
        return f"table of {len(self)}"

    def place(self, index: int) -> str:
        """The location of record `index`, as in `RecordSource`."""
        return f"row {index}"


class Files:
    """One file, one sample: its bytes, or the result of `load(path)`, which is called in DataLoader workers."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]], load: Any = None) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self._load = load or _whole

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self._load(self.paths[index])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        return [self[index] for index in indices]

    def fingerprint(self) -> str:
        """The number of files, and their names in this order."""
        names = xxhash.xxh3_64_hexdigest("\0".join(self.paths).encode())
        return f"{len(self)} files {names}"

    def place(self, index: int) -> str:
        """The path of file `index`."""
        return self.paths[index]


class Stream:
    """Partitions of offsets, each from `begin` to `end` (None: unknown). Neither shuffled nor cut into epochs.

    Args:
        reader: reads the records.
        partitions: names (each from 0 on, without an end), or `dlrover_hooks.protocol.Partition` with bounds.
    """

    def __init__(self, reader: OffsetReader, partitions: Iterable[str | Partition]) -> None:
        self.reader = reader
        given = (Partition(name=part) if isinstance(part, str) else part for part in partitions)
        self.partitions = tuple(given)
        names = [part.name for part in self.partitions]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"a stream needs partitions with different names, not {names}")
        for part in self.partitions:
            if part.begin < 0 or (part.end is not None and part.end < part.begin):
                raise UsageError(f"partition {part.name!r} has no offsets [{part.begin}, {part.end})")

    def read(self, partition: str, lo: int, hi: int) -> Sequence[Any]:
        """See `OffsetReader.read`."""
        return self.reader.read(partition, lo, hi)

    def fingerprint(self) -> str:
        """The partitions and where they begin; an end may become known later."""
        return "stream of " + ", ".join(f"{part.name}@{part.begin}" for part in self.partitions)

    def place(self, partition: str, offset: int) -> str:
        """The location of a record, for the user to find it."""
        return f"partition {partition!r} offset {offset}"


def as_source(dataset: Any) -> RecordSource | Stream:
    """`dataset` itself if it is a source, else a `Table` of it. Raises UsageError for what cannot be lent out."""
    if isinstance(dataset, Stream) or (isinstance(dataset, RecordSource) and not isinstance(dataset, type)):
        return dataset
    if isinstance(dataset, bool) or not (isinstance(dataset, int) or _map_style(dataset)):
        raise UsageError(
            f"{type(dataset).__name__} cannot be lent out in shards: records are asked for by number",
            hint="give a map-style dataset (__len__ and __getitem__), a number, or one of "
            "dlrover_hooks.data.leased.sources: Table, TextRecords, Files, Stream",
        )
    return cast(RecordSource, Table(dataset))


def _map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
