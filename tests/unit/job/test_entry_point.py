"""What a worker runs: the forms in which it can be given, and what is said if it is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.job.entry_point import entry_problem, is_script, load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from. Modules of it are forgotten with it, and so is what a script does to `sys`."""
    monkeypatch.setattr(sys, "argv", ["worker"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "entry",
    ["ppo:actor", "ppo.roles:actor", "ppo.roles.actor", "_ppo.r2:_a", "train.py", "/data/train.py --lr 0.1 'a b'"],
)
def test_forms_of_entry_points(entry: str) -> None:
    assert entry_problem(entry) == ""
    assert is_script(entry) == (".py" in entry)


@pytest.mark.parametrize(
    "entry", ["actor", "", " ", ":actor", "ppo:", "ppo.", "ppo:a.b", "ppo roles:actor", "ppo-x:actor", "1ppo:actor",
              "ppo:actor()", "ppo:actor\n"],
)  # fmt: skip
def test_what_is_no_entry_point_is_said_with_the_forms_that_are(entry: str) -> None:
    problem = entry_problem(entry)
    assert repr(entry) in problem
    assert "package.module:function" in problem
    assert "'script.py ARGUMENTS'" in problem


def test_arguments_with_an_open_quote_are_no_entry_point() -> None:
    """It is known where the job is described, not only in each worker."""
    assert "train.py 'a" in entry_problem("train.py 'a")


@pytest.mark.parametrize("entry", ["ppo_of_test.roles:work", "ppo_of_test.roles.work"])
def test_a_function_is_found_by_its_name(folder: Path, entry: str) -> None:
    write(folder, "ppo_of_test/__init__.py", "")
    write(folder, "ppo_of_test/roles.py", "def work():\n    return 'worked'\n")
    assert load(entry, "actor")() == "worked"


def test_a_module_that_is_not_there_is_the_users_to_correct(folder: Path) -> None:
    write(folder, "ppo_of_test/__init__.py", "")
    for entry, missing in (
        ("nowhere_of_test.roles:work", "nowhere_of_test"),
        ("ppo_of_test.roles:work", "ppo_of_test.roles"),
    ):
        with pytest.raises(UsageError) as refused:
            load(entry, "actor")
        assert refused.value.message == f"role 'actor': there is no module {missing!r} for {entry!r}"
        assert "env(PYTHONPATH=...)" in refused.value.hint


def test_a_function_that_is_not_there_is_the_users_to_correct(folder: Path) -> None:
    write(folder, "ppo_of_test.py", "work = 3\n")
    with pytest.raises(UsageError, match="role 'actor': module 'ppo_of_test' has no function 'wrok'"):
        load("ppo_of_test:wrok", "actor")
    with pytest.raises(UsageError, match="role 'actor': 'ppo_of_test:work' is a int, not a function"):
        load("ppo_of_test:work", "actor")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("import math\nmath.sinus", AttributeError, "sinus"),
        ("raise AttributeError('work')", AttributeError, "work"),
        ("1 / 0", ZeroDivisionError, "division"),
    ],
)
def test_an_error_in_the_module_is_raised_as_it_is(folder: Path, text: str, error: type[Exception], words: str) -> None:
    """It is not taken for a missing module or function."""
    write(folder, "ppo_of_test.py", text + "\n\ndef work():\n    pass\n")
    with pytest.raises(error, match=words):
        load("ppo_of_test:work", "actor")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_of_test", "ModuleNotFoundError: No module named 'nowhere_of_test'"),
        ("from math import sinus", "ImportError: cannot import name 'sinus'"),
        ("def work(:", r"SyntaxError: invalid syntax \(ppo_of_test.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_the_users_to_correct(folder: Path, text: str, words: str) -> None:
    write(folder, "ppo_of_test.py", text + "\n\ndef work():\n    pass\n")
    with pytest.raises(UsageError, match=f"role 'actor': module 'ppo_of_test' cannot be imported: {words}") as refused:
        load("ppo_of_test:work", "actor")
    assert refused.value.__cause__ is not None  # its traceback is printed


@pytest.mark.parametrize(
    "text", ["async def work():\n    pass", "def work():\n    yield", "async def work():\n    yield"]
)
def test_a_function_whose_call_runs_nothing_is_refused(folder: Path, text: str) -> None:
    write(folder, "ppo_of_test.py", text + "\n")
    with pytest.raises(UsageError, match="a call of 'ppo_of_test:work' runs nothing") as refused:
        load("ppo_of_test:work", "actor")
    assert "asyncio.run" in refused.value.hint


def test_a_script_runs_as_main_with_its_arguments_and_imports_what_is_beside_it(folder: Path) -> None:
    write(folder, "scripts/beside_of_test.py", "WORD = 'beside'\n")
    write(
        folder,
        "scripts/train.py",
        "import sys\nfrom pathlib import Path\nfrom beside_of_test import WORD\n"
        "Path('out').write_text(repr((__name__, sys.argv, WORD)))\n",
    )
    load("scripts/train.py --lr 0.1 'a b'", "actor")()
    expected = ("__main__", ["scripts/train.py", "--lr", "0.1", "a b"], "beside")
    assert (folder / "out").read_text() == repr(expected)


def test_a_script_runs_when_it_is_called_and_not_before(folder: Path) -> None:
    write(folder, "train.py", "raise SystemExit(75)\n")
    run = load("train.py", "actor")
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 75


def test_a_script_that_is_not_there_is_the_users_to_correct(folder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load("train.py --lr 0.1", "actor")
    assert refused.value.message == f"role 'actor': there is no script 'train.py' in {folder}"
    assert "absolute path" in refused.value.hint
