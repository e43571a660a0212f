"""Counts the lines that a run added to the text files of a folder. Lines written twice show up here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import xxhash

LARGEST, MOST = 4 << 20, 256 << 20
"""Bytes: larger files are skipped, and so is everything beyond this total."""
_SKIPPED = {"__pycache__", "node_modules", "venv"}


class TextFile(msgspec.Struct, frozen=True):
    """Size and hash of a file at one moment."""

    nbytes: int
    digest: str


def look(folder: str) -> dict[str, TextFile]:
    """The files in `folder`, by their path in it; hidden ones are left out."""
    found: dict[str, TextFile] = {}
    total = 0
    for path in _paths(folder):
        try:
            state = os.stat(path)
            found[os.path.relpath(path, folder)] = TextFile(state.st_size, _digest(path, state.st_size))
        except OSError:  # just removed, or not readable
            continue
        total += state.st_size
        if total >= MOST:
            break
    return found


def _paths(folder: str) -> Iterator[str]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(name for name in files if not name.startswith(".")):
            path = os.path.join(here, name)
            if os.path.isfile(path) and os.path.getsize(path) <= LARGEST:
                yield path


def _digest(path: str, nbytes: int) -> str:
    with open(path, "rb") as file:
        return xxhash.xxh3_64_hexdigest(file.read(nbytes))


def added(folder: str, before: dict[str, TextFile]) -> dict[str, int]:
    """Lines added to each changed file since `look`; all of its lines if it was rewritten.

    A file with a zero byte is binary and has no lines: it is left out.
    """
    lines = {}
    for name, now in look(folder).items():
        then = before.get(name)
        if then == now:
            continue
        path = os.path.join(folder, name)
        grown = then is not None and now.nbytes >= then.nbytes and _digest(path, then.nbytes) == then.digest
        with open(path, "rb") as file:
            text = file.read()
        if b"\0" not in text:
            lines[name] = text.count(b"\n", then.nbytes if grown and then is not None else 0)
    return lines
