"""The rows of requirements.toml, the markers that claim them, and what `--requirements` makes of a run."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import requirements, structure
from tests.deep import deep
from tests.requirements_report import summary

ROOT = Path(__file__).resolve().parent.parent
ROWS = {"DLRover": 105, "Scale nodes": 60, "DI Orchestrator": 81, "Paddle EDL": 80, "EasyDL": 21}
TRIAL = """
import pytest

@pytest.mark.requirement("DL-1", "DL-2")
def test_passes():
    pass

@pytest.mark.requirement("DL-2")
@pytest.mark.parametrize("bad", [False, True])
def test_fails_once(bad):
    assert not bad

@pytest.mark.requirement("DL-3")
def test_is_skipped():
    pytest.skip("not here")
"""
LATER = """
import pytest

@pytest.mark.requirement("DL-4")
def test_passes():
    pass
"""


def test_all_rows_are_there_and_have_a_text() -> None:
    rows = requirements.read()
    assert Counter(row["system"] for row in rows.values()) == ROWS
    assert {name for name in rows if not requirements.ID.fullmatch(name)} == set()
    assert [name for name, row in rows.items() if not row["text"].strip()] == []


def test_markers_name_known_rows_literally() -> None:
    rows = requirements.read()
    wrong = []
    for path, tree in structure.parsed_tests().items():
        for call in requirements.marks(tree):
            ids = [argument.value if isinstance(argument, ast.Constant) else None for argument in call.args]
            if not ids or call.keywords or any(name not in rows for name in ids):
                wrong.append(f"{path}:{call.lineno}: {ast.unparse(call)}")
    assert wrong == [], "not an ID of tests/requirements.toml"


def test_ids_stand_in_markers_only() -> None:
    """Not in the product, README.md or docs/; under tests/ in markers and in this machinery."""
    product = [path for folder in structure.FOLDERS for path in (ROOT / folder).rglob("*")]
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
    paths = [path for path in product if path.suffix in {".py", ".pyi", ".c"}] + pages
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if requirements.ID.search(line)
    ]
    for path, tree in structure.parsed_tests().items():
        if path != Path(__file__).relative_to(ROOT).as_posix():
            found += _outside_markers(path, tree)
    assert found == [], "say it in words, and claim the row with pytest.mark.requirement on the test that proves it"


def _outside_markers(path: str, tree: ast.Module) -> list[str]:
    inside = {line for call in requirements.marks(tree) for line in range(call.lineno, (call.end_lineno or 0) + 1)}
    lines = enumerate((ROOT / path).read_text().splitlines(), 1)
    return [f"{path}:{number}" for number, line in lines if number not in inside and requirements.ID.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, deep(2)])
def test_sessions_add_what_they_have_proven(tmp_path: Path, workers: int) -> None:
    """With workers of xdist and without. A row with a failing test is open, however many others pass."""
    file = tmp_path / "build" / "results.json"
    for name, source, code in (("test_trial.py", TRIAL, 1), ("test_later.py", LATER, 0)):
        (tmp_path / name).write_text(source)
        command = [*("-m", "pytest", "-q", "-c", "/dev/null", "-W", "ignore", "-p", "tests.conftest")]
        command += ["-n", str(workers), f"--rootdir={tmp_path}", f"--requirements={file}", str(tmp_path / name)]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == code, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert len(results) == 4
    assert requirements.proven(results) == {"DL-1", "DL-4"}


def test_report_counts_rows_by_system() -> None:
    rows = {name: {"system": name[:2], "text": name} for name in ("DL-1", "DL-2", "ED-1")}
    results = {"a": {"ids": ["DL-1", "ED-1"], "passed": True}, "b": {"ids": ["ED-1"], "passed": False}}
    assert summary(rows, results) == {
        "proven": 1,
        "total": 3,
        "by_system": {"DL": {"proven": 1, "total": 2}, "ED": {"proven": 0, "total": 1}},
        "open": ["DL-2", "ED-1"],
    }
