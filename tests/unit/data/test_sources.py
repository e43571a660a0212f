"""Sources: which record a number is, what cannot be read, and what changed meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_hooks.data.leased import text_records
from dlrover_hooks.data.leased.sources import Files, Stream, Table, TextRecords, as_source
from dlrover_hooks.errors import DataMismatch, UsageError
from dlrover_hooks.protocol import Partition

CONTENTS = {
    "whole lines": b"a\nbb\nccc\n",
    "no newline at the end": b"a\nbb\nccc",
    "empty": b"",
    "one newline": b"\n",
    "empty lines": b"\n\na\n\n\nb",
    "windows": b"a\r\nbb\r\n",
    "one": b"only",
    "utf-8": "ä\nöü\n€".encode(),
}


def write(folder: Path, **files: bytes) -> list[Path]:
    paths = []
    for name, content in files.items():
        path = folder / name
        path.write_bytes(content)
        paths.append(path)
    return paths


@pytest.mark.parametrize("every", [1, 2, 3, 16])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_line_is_a_record(tmp_path: Path, content: bytes, every: int) -> None:
    """Text is split by record; the last line may lack its newline, an empty file has none."""
    found = TextRecords(write(tmp_path, a=content), every=every)
    assert [found[index] for index in range(len(found))] == content.decode().splitlines()


@pytest.mark.parametrize("every", [1, 3, 16, 1000])
def test_records_of_many_files_in_any_order(tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers run through all files, whatever pieces the scan reads and however few files stay open."""
    monkeypatch.setattr(text_records, "_PIECE_BYTES", 7)
    monkeypatch.setattr(text_records, "_OPEN_FILES", 2)
    lines = [[f"{file}/{line}" * (line % 3) for line in range(count)] for file, count in enumerate((5, 0, 33, 1, 16))]
    contents = {f"f{number}": "\n".join(part).encode() + b"\n" * bool(part) for number, part in enumerate(lines)}
    found = TextRecords(write(tmp_path, **contents), every=every)
    wanted = [line for part in lines for line in part]
    numbers = list(range(len(wanted)))
    random.Random(3).shuffle(numbers)
    assert len(found) == len(wanted)
    assert found.__getitems__(numbers) == [wanted[number] for number in numbers]
    assert found.place(5) == f"{tmp_path / 'f2'} line 1"
    for outside in (-1, len(wanted)):
        with pytest.raises(IndexError):
            found[outside]


def test_the_index_is_small(tmp_path: Path) -> None:
    """8 bytes for every 16th record."""
    (path,) = write(tmp_path, a=b"x\n" * 16_000)
    assert sum(text.starts.nbytes for text in TextRecords(path).texts) == 8 * 1000


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more\n")


def rewrite(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"b" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [grow, rewrite])
@pytest.mark.parametrize("opened", [True, False])
def test_a_file_that_changed_is_refused(tmp_path: Path, change: Callable[[Path], None], opened: bool) -> None:
    """Bad input: never train on records that the split did not mean."""
    (path,) = write(tmp_path, a=b"a\nb\n")
    found = TextRecords(path)
    if opened:
        assert found[0] == "a"
    change(path)
    with pytest.raises(DataMismatch, match="changed since it was split"):
        found[1]


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    """Nodes may mount the same data elsewhere; other data at the same place is refused after a restart."""
    (tmp_path / "b").mkdir()
    (here,), (there,) = write(tmp_path, a=b"a\nb\n"), write(tmp_path / "b", c=b"a\nb\n")
    (other,) = write(tmp_path, d=b"a\nc\n")
    assert TextRecords(here).fingerprint() == TextRecords(there, every=1).fingerprint()
    assert TextRecords(here).fingerprint() != TextRecords(other).fingerprint()


def test_bytes_and_bad_text(tmp_path: Path) -> None:
    """One bad record does not spoil its neighbours."""
    (path,) = write(tmp_path, a=b"good\n\xff\ngood\n")
    assert TextRecords(path, encoding=None)[1] == b"\xff"
    assert TextRecords(path).__getitems__([0, 2]) == ["good", "good"]
    with pytest.raises(UnicodeDecodeError):
        TextRecords(path)[1]


def test_a_missing_file_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        TextRecords(tmp_path / "none")


def test_files(tmp_path: Path) -> None:
    """A list of files, one sample each; one that cannot be read raises when it is read, not before."""
    a, b = write(tmp_path, a=b"1", b=b"22")
    found = Files([a, b, tmp_path / "none"])
    assert len(found) == 3
    assert found.__getitems__([1, 0]) == [b"22", b"1"]
    assert found.place(2) == str(tmp_path / "none")
    with pytest.raises(OSError, match="none"):
        found[2]
    assert Files([a, b], load=os.path.getsize)[1] == 2
    assert Files([a, b]).fingerprint() != Files([b, a]).fingerprint()


class Rows:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        return "abc"[index]


def test_tables() -> None:
    """A range, or any map-style dataset."""
    assert Table(5).__getitems__([4, 0]) == [4, 0]
    table = as_source(Rows())
    assert isinstance(table, Table)
    assert table.__getitems__([2, 1]) == ["c", "b"]
    assert isinstance(as_source(7), Table)
    assert as_source(table) is table


@pytest.mark.parametrize("wrong", [iter(()), 1.5, True, None])
def test_what_cannot_be_lent_out(wrong: Any) -> None:
    with pytest.raises(UsageError, match="cannot be lent out"):
        as_source(wrong)


class Log:
    def read(self, partition: str, lo: int, hi: int) -> Sequence[str]:
        return [f"{partition}{offset}" for offset in range(lo, min(hi, 10))]


def test_streams() -> None:
    """Partitions and offsets."""
    stream = Stream(Log(), ["a", Partition(name="b", begin=4, end=9)])
    assert stream.read("b", 8, 12) == ["b8", "b9"]
    assert stream.partitions == (Partition(name="a"), Partition(name="b", begin=4, end=9))
    assert stream.fingerprint() == Stream(Log(), ["a", Partition(name="b", begin=4)]).fingerprint()
    for wrong in ([], ["a", "a"], [Partition(name="a", begin=5, end=4)], [Partition(name="a", begin=-1)]):
        with pytest.raises(UsageError):
            Stream(Log(), wrong)


def test_the_scan_counts_like_python(tmp_path: Path) -> None:
    """Random bytes, every piece size: the scan agrees with a plain split."""
    rng = np.random.default_rng(1)
    for every in (1, 4):
        content = rng.choice(np.frombuffer(b"ab\n", np.uint8), 500).tobytes() + b"a"
        (path,) = write(tmp_path, a=content)
        found = TextRecords(path, every=every, encoding=None)
        assert found.__getitems__(range(len(found))) == content.split(b"\n")
