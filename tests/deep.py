"""Marks the cases of a matrix that repeat a proof: `make test-deep` runs them, `make test` does not."""

from __future__ import annotations

from typing import Any

import pytest


def deep(*values: Any, **options: Any) -> Any:
    """`pytest.param` with the marker `deep`. At least one case of a matrix is without it."""
    return pytest.param(*values, marks=pytest.mark.deep, **options)
