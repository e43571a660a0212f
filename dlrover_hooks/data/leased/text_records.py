"""`TextRecords`: the lines of text files by number, without holding the text.

Each file is scanned once by numpy for its newlines. The start of every `every`-th record is kept (8 bytes), and a
record is found by reading that many lines. The scan also hashes the content, so that a changed file is detected:
another size or modification time while reading, another content after a restart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrover_hooks.errors import DataMismatch, UsageError

EVERY = 16
_PIECE_BYTES = 4 << 20
_OPEN_FILES = 64
_NEWLINE = ord("\n")


class Text(msgspec.Struct, frozen=True):
    """One file as scanned: `starts[g]` is the byte at which record `g * every` begins."""

    path: str
    nbytes: int
    mtime_ns: int
    digest: str
    records: int
    starts: NDArray[np.int64]


class TextRecords:
    """The lines of `paths` in sequence: a line is a record, without its line end.

    Scanning reads everything once (about a second per GB).

    Args:
        paths: one file or several, in the order of their records.
        encoding: None gives bytes.
        every: the start of every `every`-th record is kept, 8 bytes; a read costs that many lines.

    Raises UsageError for a file that cannot be read now. Reading raises DataMismatch if a file has changed.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
        *,
        encoding: str | None = "utf-8",
        every: int = EVERY,
    ) -> None:
        if every < 1:
            raise UsageError(f"every={every} must be at least 1")
        several = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.every, self.encoding = every, encoding
        self.texts = [scan(os.fspath(path), every) for path in several]
        self._ends = np.cumsum([text.records for text in self.texts], dtype=np.int64)
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.texts else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        groups: dict[tuple[int, int], list[bytes]] = {}
        records: list[Any] = []
        for number, line in map(self._find, indices):
            group = (number, line // self.every)
            if group not in groups:
                groups[group] = self._lines(*group)
            record = groups[group][line % self.every].removesuffix(b"\r")
            records.append(record if self.encoding is None else record.decode(self.encoding))
        return records

    def fingerprint(self) -> str:
        """Number of records and content of all files in this order (not their names, which differ between nodes)."""
        content = xxhash.xxh3_64_hexdigest("".join(f"{text.nbytes}:{text.digest}," for text in self.texts).encode())
        return f"{len(self)} text records {content}"

    def place(self, index: int) -> str:
        """File and line of record `index`."""
        number, line = self._find(index)
        return f"{self.texts[number].path} line {line + 1}"

    def close(self) -> None:
        """Close the files opened for reading; reading opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}}

    def _find(self, index: int) -> tuple[int, int]:
        """(file, line in it), both counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number]) + self.texts[number].records

    def _lines(self, number: int, group: int) -> list[bytes]:
        text = self.texts[number]
        lo = int(text.starts[group])
        hi = int(text.starts[group + 1]) if group + 1 < len(text.starts) else text.nbytes
        fd = self._opened(number)
        found = os.fstat(fd)
        if (found.st_size, found.st_mtime_ns) != (text.nbytes, text.mtime_ns):
            raise _changed(text, found)
        return os.pread(fd, hi - lo, lo).split(b"\n")

    def _opened(self, number: int) -> int:
        """A descriptor that stays open. A fork may share it, since reads pass their offset."""
        fd = self._open.get(number)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[number] = os.open(self.texts[number].path, os.O_RDONLY | os.O_CLOEXEC)
        return fd


def scan(path: str, every: int) -> Text:
    """Find the records of one file in one pass, 4 MiB at a time."""
    try:
        with open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            text = _scan(file, path, every, before)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise UsageError(f"{path} cannot be split into records: {error}", hint="mend or leave out the file") from error
    if text.nbytes != before.st_size or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise _changed(text, after)
    return text


def _scan(file: Any, path: str, every: int, before: os.stat_result) -> Text:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    digest = xxhash.xxh3_64()
    starts: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    lines = at = 0
    last = _NEWLINE
    while got := file.readinto(buffer):
        piece = np.frombuffer(buffer[:got], np.uint8)
        digest.update(buffer[:got])
        ends = np.flatnonzero(piece == _NEWLINE)
        starts.append(ends[-(lines + 1) % every :: every] + (at + 1))  # newline j ends record j: record j + 1 follows
        lines, at, last = lines + len(ends), at + got, int(piece[-1])
    records = lines + (last != _NEWLINE)
    kept = np.concatenate(starts)[: -(-records // every)]
    return Text(path, at, before.st_mtime_ns, digest.hexdigest(), records, kept)


def _changed(text: Text, found: os.stat_result) -> DataMismatch:
    return DataMismatch(
        f"{text.path} changed since it was split into records: it had {text.nbytes} bytes (mtime {text.mtime_ns} ns), "
        f"now {found.st_size} (mtime {found.st_mtime_ns} ns)",
        hint="put the file back as it was, or start a new run; write new data into new files",
    )
