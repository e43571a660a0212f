"""What the pages say is true: code compiles and runs, commands and flags exist, the manual builds."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import pytest

import dlrover_hooks
from dlrover_hooks.config import PREFIX, Config, interval

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
RUNNABLE = re.compile(r"<!-- runnable(?: with (\d+) workers)? -->$")
"""Put before a python block: the test runs it in an empty folder, in one process or by the launcher."""


def blocks(language: str) -> list[tuple[str, str, int | None]]:
    """(place, text, workers) of every block of `language` on all pages; 0 workers: without launcher, None: not run."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            mark = RUNNABLE.search(text[: match.start()].rstrip())
            workers = None if mark is None else int(mark[1] or 0)
            found.append((f"{page.relative_to(ROOT).as_posix()}:{line}", match[1], workers))
    return found


def commands() -> list[tuple[str, str]]:
    """(place, command line) of every line of the console blocks that begins with a prompt."""
    return [
        (place, line.removeprefix("$ "))
        for place, text, _ in blocks("console")
        for line in text.splitlines()
        if line.startswith("$ ")
    ]


@cache
def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CLI = ("-c", "from dlrover_hooks.cli.main import main; main(prog_name='dlrover-hooks')")


@pytest.mark.parametrize(("place", "text"), [(place, text) for place, text, _ in blocks("python")])
def test_python_blocks_compile(place: str, text: str) -> None:
    compile(text, place, "exec")


@pytest.mark.parametrize(("place", "text", "workers"), [block for block in blocks("python") if block[2] is not None])
def test_runnable_blocks_run(place: str, text: str, workers: int, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(text)
    launcher = ["-m", "dlrover_hooks", "run", "-n", str(workers), "--job", "page"] if workers else []
    done = subprocess.run(
        [sys.executable, *launcher, script],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(("place", "line"), commands())
def test_console_commands_exist(place: str, line: str) -> None:
    """Our own commands and their flags, and make's targets; other programs are not ours to check."""
    words = shlex.split(line)
    flags = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in words[1:] if "=" not in word]
        benches = [word.removeprefix("bench-") for word in targets if word.startswith("bench-")]
        assert all((ROOT / f"tests/benchmarks/bench_{name}.py").exists() for name in benches), place
        rest = [target for target in targets if not target.startswith("bench-")]
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in rest), place
    elif words[0] == "dlrover-hooks":
        text = help_of(*CLI, *words[1 : 3 if words[1] == "ckpt" else 2])
        assert {flag for flag in flags if flag not in text} == set(), place
    elif words[:3] == ["python", "-m", "dlrover_hooks.master"]:
        text = help_of("-m", "dlrover_hooks.master")
        assert {flag for flag in flags if flag not in text} == set(), place


def test_every_setting_has_a_row() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    names = [PREFIX + field.name.upper() for field in msgspec.structs.fields(Config) if field.name != "named"]
    assert [name for name in names if f"| `{name}` |" not in page] == []


def effective(name: str, default: object) -> str:
    """The default as the page shows it: None given means the setting's own default."""
    own = {field.name: field.default for field in msgspec.structs.fields(Config)}
    value = own.get(name) if default is None else default
    if value is msgspec.NODEFAULT:  # a fresh container each time
        value = None
    if name in ("save_every", "persist_every") and value == interval("10m", name=name):
        value = "10m"
    return repr(value if isinstance(value, bool | int) or value else None).replace("'", '"')


def test_callback_arguments_are_the_documented_ones() -> None:
    """`docs/lightning.md` lists the names and the defaults of the real signature."""
    from dlrover_hooks.integrations.lightning import ElasticCallback

    page = (ROOT / "docs/lightning.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(.*?)` \|", page, re.M)
    shown = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    parameters = inspect.signature(ElasticCallback).parameters.values()
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]  # that one answers misspelt names
    assert shown == {one.name: effective(one.name, one.default) for one in named}


def public() -> list[object]:
    """What a user can import and is promised: the lazy names and each adapter's own."""
    from dlrover_hooks.integrations.accelerate import ElasticAccelerator
    from dlrover_hooks.integrations.accelerate.accelerator import PreparedLoader
    from dlrover_hooks.integrations.fabric import ElasticFabric, SetUpLoader
    from dlrover_hooks.integrations.lightning import ElasticCallback

    adapters = [ElasticAccelerator, PreparedLoader, ElasticCallback, ElasticFabric, SetUpLoader]
    return [*adapters, *(getattr(dlrover_hooks, name) for name in dlrover_hooks._PUBLIC)]


def test_every_public_name_has_its_contract_written_down() -> None:
    bare = []
    for thing in public():
        members = {} if not inspect.isclass(thing) else {n: m for n, m in vars(thing).items() if not n.startswith("_")}
        documented = {n: getattr(thing, n) for n, m in members.items() if callable(m) or isinstance(m, property)}
        everything = {"": thing, **documented}
        bare += [
            f"{getattr(thing, '__name__', thing)}.{n}" for n, member in everything.items() if not inspect.getdoc(member)
        ]
    assert bare == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Files and pictures that a page links to exist; addresses on the web are not tried."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    files = [link.split("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert [name for name in files if not (page.parent / name).exists()] == []


def test_the_manual_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-d",
            tmp_path / "trees",
            ROOT / "docs",
            tmp_path / "html",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html/index.html").is_file()


def test_the_manual_says_what_ci_proves() -> None:
    assert "Python 3.11" in (ROOT / "docs/quickstart.md").read_text()
    assert "Python 3.11" in (ROOT / "README.md").read_text()
