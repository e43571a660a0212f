"""Marks the cases of a matrix that `make test` leaves to `make test-deep`, and divides the deep tests into parts."""

from __future__ import annotations

import argparse
import re
import zlib
from typing import Any, NamedTuple

import pytest


def deep(*values: Any, **options: Any) -> Any:
    """`pytest.param` with the marker `deep`. At least one case of a matrix is without it."""
    return pytest.param(*values, marks=pytest.mark.deep, **options)


class Part(NamedTuple):
    """A part of all deep tests, such as the first of two. A file is in one part: its tests share fixtures."""

    number: int
    of: int

    def has(self, file: str) -> bool:
        """Whether the tests of this file are in this part. That depends on its path alone."""
        return zlib.crc32(file.encode()) % self.of == self.number - 1


def part(text: str) -> Part:
    """The part that a command line gives as "1/2". Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part: give one such as 1/2 or 2/2")
    return Part(int(found[1]), int(found[2]))
