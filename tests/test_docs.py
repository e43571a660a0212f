"""What the pages say is true: code compiles and runs, commands and flags exist, the manual builds."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
import shlex
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from dlrover_hooks import errors
from dlrover_hooks.config import Config, interval
from tests.warm import warm

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("dlrover_hooks", "integrations", "master_server")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))
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


FRAMEWORKS = ("torch._dynamo", "accelerate", "lightning.pytorch", "transformers.trainer")
"""What the blocks import, and what their imports take longer than they run."""


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


@pytest.mark.deep
@pytest.mark.parametrize(
    ("place", "text", "workers"),
    [block for block in blocks("python") if block[2] is not None],
)
def test_runnable_blocks_run(place: str, text: str, workers: int, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(text)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if workers:
        command = [sys.executable, "-m", "dlrover_hooks", "run", "-n", str(workers), "--standby", "0", "--job", "page"]
        command += [str(script)]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
        code, said = run.returncode, run.stdout + run.stderr
    else:
        block = warm(FRAMEWORKS, env).start([str(script)], env, cwd=str(tmp_path))
        try:
            code = block.wait(200)
        finally:
            block.kill()
        said = "".join(block.communicate())
    assert code == 0, f"{place}\n{said}"


@pytest.mark.parametrize(("place", "line"), commands())
def test_console_commands_exist(place: str, line: str) -> None:
    """Our own commands and their flags, and make's targets; other programs are not ours to check."""
    words = shlex.split(line)
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    words = words[: script + 1]  # what follows are flags of the script
    flags = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in words[1:] if "=" not in word]
        benches = [word.removeprefix("bench-") for word in targets if word.startswith("bench-")]
        assert all((ROOT / f"tests/benchmarks/bench_{name}.py").exists() for name in benches), place
        rest = [target for target in targets if not target.startswith("bench-")]
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in rest), place
    elif words[0] == "dlrover-hooks":
        grouped = words[1] in ("ckpt", "brain") and len(words) > 2 and not words[2].startswith("-")
        text = help_of(*CLI, *words[1 : 3 if grouped else 2])
        assert {flag for flag in flags if flag not in text} == set(), place
    elif words[:3] == ["python", "-m", "dlrover_hooks.master"]:
        text = help_of("-m", "dlrover_hooks.master")
        assert {flag for flag in flags if flag not in text} == set(), place


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


ELSEWHERE = "dlrover_hooks.integrations.tensorflow"
"""An adapter whose framework is not in this environment."""
ADAPTERS = [path for path in sorted((ROOT / "integrations").iterdir()) if path.stem[0] != "_"]
PUBLIC = [
    *("dlrover_hooks", "dlrover_hooks.session", "dlrover_hooks.errors", "dlrover_hooks.data.leased.sources"),
    *("dlrover_hooks.testing", "dlrover_hooks.testing.faults.fault_plan"),
    *(name for path in ADAPTERS if (name := f"dlrover_hooks.integrations.{path.stem}") != ELSEWHERE),
]
"""The modules all of whose names are public."""


def names(module: ModuleType) -> list[str]:
    """The names of its table or `__all__`; else what it defines or imports to be imported from it (`X as X`)."""
    if (table := getattr(module, "_PUBLIC", None) or getattr(module, "__all__", None)) is not None:
        return list(table)
    found: list[str] = []
    for line in ast.parse(inspect.getsource(module)).body:
        if isinstance(line, ast.ClassDef | ast.FunctionDef) and line.name[0] != "_":
            found.append(line.name)
        elif isinstance(line, ast.ImportFrom):
            found += [one.name for one in line.names if one.asname == one.name]
    return found


def public() -> dict[str, Any]:
    """What a user can import and is promised, by module and name."""
    modules = [importlib.import_module(name) for name in PUBLIC]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in names(module)}
    assert len(found) > 60  # not an empty table
    return found


def shown() -> dict[str, Any]:
    """What the pages import from this library. The routes stand for the messages of `dlrover_hooks.protocol`."""
    imports = [node for _, text, _ in blocks("python") for node in ast.parse(text).body]
    imports = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module != "dlrover_hooks.protocol"]
    found = {
        f"{node.module}.{one.name}": pydoc.locate(f"{node.module}.{one.name}")
        for node in imports
        for one in node.names
        if (node.module or "").split(".")[0] == "dlrover_hooks" and not (node.module or "").startswith(ELSEWHERE)
    }
    return {name: thing for name, thing in found.items() if not inspect.ismodule(thing)}


def test_every_public_name_has_its_contract_written_down() -> None:
    bare = []
    for thing in public().values():
        members = {} if not inspect.isclass(thing) else {n: m for n, m in vars(thing).items() if not n.startswith("_")}
        documented = {n: getattr(thing, n) for n, m in members.items() if callable(m) or isinstance(m, property)}
        everything = {"": thing, **documented}
        bare += [
            f"{getattr(thing, '__name__', thing)}.{n}" for n, member in everything.items() if not inspect.getdoc(member)
        ]
    assert bare == []


def quoted() -> list[str]:
    """The messages in the first column of the tables of troubleshooting.md."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    tables = re.findall(r"^\| (?:message|symptom) \|.*\n\|[-|]*\n((?:\|.*\n)+)", page, re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


@cache
def texts() -> list[str]:
    """Every string of the product's sources, docstrings excepted, and names of errors. A value in it is "..."."""
    found = [name for name, thing in vars(errors).items() if inspect.isclass(thing)]
    for path in [path for name in SOURCES for path in (ROOT / name).rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", quoted())
def test_quoted_messages_are_those_of_the_product(message: str) -> None:
    """Each part is in one line of one string of the sources, in that order, with a value where the page has "..."."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    assert any(re.search(r".*\.\.\..*".join(parts), text) for text in texts()), message


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Files and pictures that a page links to exist; addresses on the web are not tried."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    files = [link.split("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert [name for name in files if not (page.parent / name).exists()] == []


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built manual."""
    folder = tmp_path_factory.mktemp("manual")
    flags = ["-W", "--keep-going", "-q", "-d", folder / "trees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *flags, ROOT / "docs", folder / "html"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.deep
def test_the_manual_builds_without_warnings(manual: Path) -> None:
    assert (manual / "index.html").is_file()


@pytest.mark.deep
def test_the_reference_describes_every_public_name(manual: Path) -> None:
    """Sphinx's inventory lists what it describes. A name counts under any path that leads to the same object."""
    packed = (manual / "objects.inv").read_bytes().split(b"\n", 4)[4]  # after four lines of head
    rows = [line.split() for line in zlib.decompress(packed).decode().splitlines()]
    things = [row[0] for row in rows if row[1] in ("py:class", "py:function", "py:exception")]
    described = {id(pydoc.locate(name)) for name in things if not name.startswith(ELSEWHERE)}
    assert [name for name, thing in (public() | shown()).items() if id(thing) not in described] == []


def test_the_manual_says_what_ci_proves() -> None:
    assert "Python 3.11" in (ROOT / "docs/quickstart.md").read_text()
    assert "Python 3.11" in (ROOT / "README.md").read_text()
