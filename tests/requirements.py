"""The mission's requirements (requirements.toml), the tests that claim them, and what a run of the tests has proven."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] - pytest brings it there

TESTS = Path(__file__).resolve().parent
ID = re.compile(r"\b(?:DI|DL|ED|EZ|SC)-\d+\b")
MARK = "requirement"


def read() -> dict[str, dict[str, str]]:
    """The rows by ID: their system and one line of text."""
    return tomllib.loads((TESTS / "requirements.toml").read_text())


def marks(tree: ast.Module) -> Iterator[ast.Call]:
    """Each `pytest.mark.requirement(...)` of a module."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == MARK  # `unparse` for all calls would take seconds
            and ast.unparse(node.func) == f"pytest.mark.{MARK}"
        ):
            yield node


class Recorder:
    """The plugin behind `--requirements FILE`: writes how each test with the marker ended.

    Workers of xdist send the IDs along with their reports; the process that started them writes the file. What an
    earlier session has written stays, except for tests that ran again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ids = {name for mark in item.iter_markers(MARK) for name in mark.args}
            if ids:
                item.user_properties.append((MARK, sorted(ids)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ids = dict(report.user_properties).get(MARK)
        if ids is None:
            return
        if report.failed:
            self._results[report.nodeid] = {"ids": ids, "passed": False}
        elif report.passed and report.when == "call":
            self._results.setdefault(report.nodeid, {"ids": ids, "passed": True})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        earlier = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(earlier | self._results, indent=2) + "\n")


def proven(results: dict[str, dict[str, Any]]) -> set[str]:
    """Rows with a passing test and without a failing one."""
    passed = {name for result in results.values() if result["passed"] for name in result["ids"]}
    failed = {name for result in results.values() if not result["passed"] for name in result["ids"]}
    return passed - failed
