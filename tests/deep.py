"""Marks the cases of a matrix that repeat a proof: `make test-deep` runs them, `make test` does not."""

from __future__ import annotations

import zlib
from typing import Any

import pytest


def deep(*values: Any, **options: Any) -> Any:
    """`pytest.param` with the marker `deep`. At least one case of a matrix is without it."""
    return pytest.param(*values, marks=pytest.mark.deep, **options)


def in_part(test: str, part: str) -> bool:
    """Whether a test belongs to a part such as "1/2" of all. That depends on its name alone."""
    number, of = map(int, part.split("/"))
    return zlib.crc32(test.encode()) % of == number % of
