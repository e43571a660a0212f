"""The parts of the manual that are made from code."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


@cache
def tables(name: str) -> dict[str, str]:
    """The tables that docs/NAME.py makes."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tables()
