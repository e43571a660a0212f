"""The house rules that a machine can check. Each failure message says what to do instead."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import structure

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FUNCTION = 50
READS_ENVIRONMENT = {"dlrover_hooks/config/settings.py"}  # children get theirs from config.worker_environment
PURE_IMPORTS = {
    *("__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math"),
    *("operator", "re", "statistics", "types", "typing", "zlib", "msgspec"),
    *("dlrover_hooks.protocol", "dlrover_hooks.errors", "dlrover_hooks.protocol.ranges"),
}
BINARY = {".png", ".svg", ".ico", ".gz"}


@cache
def package() -> dict[str, ast.Module]:
    """Parsed sources of the installed package, each once (rglob does not follow the links)."""
    paths = [path for folder in structure.FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(), str(path)) for path in paths}


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module named by an import, inside functions too; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tracked() -> list[Path]:
    """Files of the repository: those git knows or would add; none outside a clone."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git clone")
    paths = (ROOT / name for name in listing.stdout.splitlines())
    return [path for path in paths if path.is_file() and not path.is_symlink() and path.suffix not in BINARY]


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def measured() -> dict[str, Any]:
    return structure.measure()


def test_a_class_name_stands_for_one_thing() -> None:
    assert measured()["duplicates"] == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert measured()["circles"] == []


def test_packages_stay_small_enough_to_walk() -> None:
    assert {name: count for name, count in measured()["modules_per_package"].items() if count > 16} == {}


def test_each_package_says_what_it_is() -> None:
    found = [name for name, tree in package().items() if name.endswith("__init__.py") and not ast.get_docstring(tree)]
    assert found == [], "one sentence on what it is and is not, and its way in"


def test_each_package_names_what_exists() -> None:
    """`module.name` in the docstring of a package: a module of it, or an absolute path."""
    wrong = []
    for name, tree in package().items():
        here, text = Path(name).parent, (ast.get_docstring(tree) or "") if name.endswith("__init__.py") else ""
        for reference in re.findall(r"`(\w+)\.(\w[\w.]*)`", text):
            head, rest = reference
            inside = [here / f"{head}.py", here / head, ROOT / head]
            found = next((ROOT / path for path in inside if (ROOT / path).exists()), None)
            last = rest.split(".")[-1]
            if found is None or (
                found.suffix == ".py" and not re.search(rf"\b(class|def) {last}\b", found.read_text())
            ):
                wrong.append(f"{name}: {head}.{rest}")
    assert wrong == []


def test_the_pure_machines_import_nothing_impure() -> None:
    """No clock, random, I/O or threads in `master.core`: events in, effects out, `now` is an argument."""
    wrong = []
    for name, tree in package().items():
        if not name.startswith("master_server/core/"):
            continue
        for module in imports(tree):
            known = any(module == good or module.startswith(good + ".") for good in PURE_IMPORTS)
            if not known and not module.startswith("dlrover_hooks.master.core"):
                wrong.append(f"{name}: {module}")
    assert wrong == []


def test_the_pure_machines_call_no_input_or_output() -> None:
    wrong = [
        f"{name}:{node.lineno} {node.func.id}()"
        for name, tree in package().items()
        if name.startswith("master_server/core/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in {"open", "print", "input", "exec", "eval", "__import__"}
    ]
    assert wrong == []


def test_functions_stay_short() -> None:
    found = {
        f"{name}:{node.name}": size
        for name, tree in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (size := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    }
    assert found == {}


def test_classes_name_the_thing() -> None:
    vague = re.compile(r"(Manager|Handler|Utils?|Helper)$|^Base")
    names = [
        f"{name}: {node.name}"
        for name, tree in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and vague.search(node.name)
    ]
    given = {"JobManager", "PSManager", "WorkerManager"}  # the mission names them
    assert [name for name in names if name.rpartition(" ")[2] not in given] == [], "name the thing, in a plain noun"


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    wrong = [
        f"{name}: {module}"
        for name, tree in package().items()
        for module in imports(tree)
        if module.split(".")[0] in banned
    ]
    assert wrong == [], "messages are msgspec JSON, checkpoints are safetensors with tagged JSON"


def test_torch_load_is_never_called() -> None:
    """Nor torch.save, but where a file is made for stock tools to load."""
    calls = re.compile(r"\btorch\.(load|save)\(")
    found = {(name, call) for name in package() for call in calls.findall((ROOT / name).read_text())}
    wrong = sorted(
        found - {("dlrover_hooks/pytorch/export.py", "save"), ("integrations/lightning/async_checkpoint_io.py", "save")}
    )
    assert wrong == [], "torch.load and torch.save pickle; use the image of dlrover_hooks.checkpoint"


def reads_environment(tree: ast.Module) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
        for node in ast.walk(tree)
    )


def test_one_reader_of_the_environment() -> None:
    readers = {name for name, tree in package().items() if reads_environment(tree)}
    assert readers - READS_ENVIRONMENT == set(), "read it in dlrover_hooks/config/settings.py"


def test_no_debugging_is_left_behind() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"breakpoint", "print"}
    ]
    assert wrong == [], "log, or draw with rich; print only through click.echo"


STARTS_THREADS = {
    "dlrover_hooks/host/background_thread.py": "the one place",
    "dlrover_hooks/checkpoint/memory/memcpy.py": "a copy's helpers: joined, and their errors raised, by the same call",
    "dlrover_hooks/checkpoint/restore/stored_image.py": "a read's helpers, likewise",
    "dlrover_hooks/checkpoint/storage/stall_guard.py": "one call, whose error its caller raises; abandoned if it hangs",
}


def starts_a_thread(node: ast.AST) -> bool:
    """`threading.Thread(...)` and what does the same, or a class derived from it."""
    names = {"Thread", "Timer", "start_new_thread"}
    of = node.bases if isinstance(node, ast.ClassDef) else [node.func] if isinstance(node, ast.Call) else []
    return any(
        (isinstance(one, ast.Attribute) and one.attr in names) or (isinstance(one, ast.Name) and one.id in names)
        for one in of
    )


def test_no_thread_ends_silently() -> None:
    found = {name for name, tree in package().items() if any(starts_a_thread(node) for node in ast.walk(tree))}
    assert found == set(STARTS_THREADS), "use dlrover_hooks.host.background_thread; drop what is no exception any more"


def test_tests_do_not_sleep() -> None:
    pattern = re.compile(r"\btime\.sleep\(|from time import .*\bsleep\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert wrong == [], "wait for the event itself (a pipe, a socket, a condition), with a deadline"


def polls(loop: ast.While) -> bool:
    """It compares a clock with a deadline, or passes time with `select.select([], [], [], ...)`."""
    clocks = ("time.monotonic()", "time.perf_counter()", "time.time()")
    compared = {part for node in ast.walk(loop) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    called = {node: ast.unparse(node) for node in ast.walk(loop) if isinstance(node, ast.Call)}
    return any(
        text.startswith("select.select([], [], []") or (call in compared and text in clocks)
        for call, text in called.items()
    )


def test_tests_wait_in_one_way() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in structure.parsed_tests().items()
        if path != "tests/waiting.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and polls(node)
    ]
    assert wrong == [], "use tests.waiting.until, which has a deadline and says what it waited for"


def test_make_test_runs_a_case_of_each_matrix() -> None:
    """A list of cases of which some are deep has one that is not."""
    wrong = []
    for path, tree in structure.parsed_tests().items():
        decorators = [one for node in ast.walk(tree) for one in getattr(node, "decorator_list", ())]
        for one in decorators if "tests.deep" in imports(tree) else ():
            for cases in [*one.args[1:], *(word.value for word in one.keywords)] if isinstance(one, ast.Call) else ():
                parts = cases.elts if isinstance(cases, ast.List) else []
                if parts and all("deep" in {n.id for n in ast.walk(part) if isinstance(n, ast.Name)} for part in parts):
                    wrong.append(f"{path}:{cases.lineno}")
    assert wrong == [], "make test would leave the whole test out"


def test_contributing_lists_each_folder_of_tests() -> None:
    listed = re.findall(r"^\| `tests/(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("*/*.py")}
    assert sorted(listed) == sorted(folders)


def test_nothing_names_a_machine_or_a_registry() -> None:
    """Paths of one computer and hosts of package registries have no place in a repository."""
    pattern = re.compile(
        r"/(?:root|home|Users)/\w|/work/\w|/opt/[a-z]|pythonhosted\.|pypi\.org/simple|download\.pytorch\."
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert wrong == []
