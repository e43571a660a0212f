"""The wheel and the sdist hold exactly the package, from any kind of checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import structure
from tests.deep import deep

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")
HELPERS = {f"dlrover_hooks/checkpoint/{name}.abi3.so" for name in ("memory/_copy", "tensors/_look")}
LINKS = {name.replace(".", "/"): f"../{folder}" for folder, name in structure.FOLDERS.items() if folder != name}
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> dict[str, Path]:
    """Every file that belongs to the package: its path in the wheel, and where it lies here."""
    found = {}
    for folder, name in structure.FOLDERS.items():
        inside = name.replace(".", "/")
        for path in (ROOT / folder).rglob("*"):  # rglob does not follow the links
            if path.is_file() and path.suffix in {".py", ".pyi", ".typed", ".c"}:
                found[f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"] = path
    return found


def checkout(target: Path, *, links: bool) -> Path:
    """A copy of what packaging reads; without `links` they are text files, as git writes them where it may not link."""
    for folder in structure.FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=IGNORED)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    for name, text in {} if links else LINKS.items():
        os.unlink(target / name)
        (target / name).write_text(text)
    return target


def build(tree: Path, **environ: str) -> tuple[Path, Path]:
    """The sdist, and the wheel built from that sdist."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree],
        capture_output=True,
        text=True,
        timeout=200,
        env={name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    (wheel,) = (tree / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module", params=["links", deep("links as text"), deep("no compiler")])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], Path]:
    """Names in the sdist, names in the wheel, the wheel."""
    environ = {"CC": "false"} if request.param == "no compiler" else {}
    sdist, wheel = build(checkout(tmp_path_factory.mktemp("checkout"), links=request.param == "links"), **environ)
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    return in_sdist, in_wheel, wheel


def test_wheel_holds_exactly_the_package(built: tuple[set[str], set[str], Path]) -> None:
    _, names, _ = built
    package = {name for name in names if ".dist-info/" not in name}
    assert package - HELPERS == {name for name in sources() if not name.endswith(".c")}


def test_the_c_helpers_are_built_where_there_is_a_compiler(
    built: tuple[set[str], set[str], Path], request: pytest.FixtureRequest
) -> None:
    """Without one the wheel is whole all the same: what they do is done in Python."""
    compiler = shutil.which("cc") is not None and request.node.callspec.params["built"] != "no compiler"
    assert built[1] & HELPERS == (HELPERS if compiler else set())


def test_sdist_holds_the_sources_and_nothing_else(built: tuple[set[str], set[str], Path]) -> None:
    names, _, _ = built
    wanted = {path.relative_to(ROOT).as_posix() for path in sources().values()} | set(FILES)
    generated = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert names - generated == wanted


def test_wheel_imports_by_itself(built: tuple[set[str], set[str], Path], tmp_path: Path) -> None:
    """From the archive alone, away from the checkout: the linked rooms are real packages in it."""
    code = (
        "import dlrover_hooks, dlrover_hooks.integrations, dlrover_hooks.master.core as core;"
        "assert 'site' in core.__file__, core.__file__;"
        "from dlrover_hooks.checkpoint.memory import memcpy as copying;"
        f"assert copying.Copier().native == {built[1] >= HELPERS}"
    )
    with zipfile.ZipFile(built[2]) as archive:
        archive.extractall(tmp_path / "site")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", code],
        env=environ,
        cwd=tmp_path,
        check=True,
    )


def test_torch_finds_the_rendezvous_in_an_installed_wheel(
    built: tuple[set[str], set[str], Path], tmp_path: Path
) -> None:
    """`torchrun --rdzv-backend=dlrover` with nothing but the package. To be asked for it loads no torch."""
    with zipfile.ZipFile(built[2]) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; from importlib.metadata import entry_points;"
        "(one,) = entry_points(group='torchrun.handlers', name='dlrover');"
        "assert callable(one.load()());"
        "assert not {'torch', 'requests', 'msgspec', 'asyncio'} & set(sys.modules)"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, check=True)


def test_package_list_equals_the_tree() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    tree = {Path(name).parent.as_posix().replace("/", ".") for name in sources() if name.endswith(".py")}
    assert sorted(listed) == sorted(tree), (
        "pyproject.toml [tool.setuptools] packages must list each package of the tree"
    )
    assert len(listed) == len(set(listed))


def test_every_package_folder_has_an_init() -> None:
    names = set(sources())
    folders = {Path(name).parent.as_posix() for name in names if name.endswith(".py")}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in names] == []


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_links_are_tracked_links(link: str, target: str) -> None:
    if not (ROOT / link).is_symlink():
        pytest.skip("this checkout has no links")
    assert os.readlink(ROOT / link) == target


def test_version_is_the_same_in_both_places() -> None:
    text = (ROOT / "dlrover_hooks/__init__.py").read_text()
    assert f'__version__ = "{project()["project"]["version"]}"' in text


def test_extras_name_one_tensorflow() -> None:
    """tensorflow and tensorflow-cpu own the same files; tf-keras would bring the former beside the latter."""
    extras = project()["project"]["optional-dependencies"]
    named = {re.split("[ <>=;[]", one)[0] for extra in extras.values() for one in extra}
    assert {name for name in named if name.startswith(("tensorflow", "tf"))} == {"tensorflow"}


def test_gpu_facts_come_from_nvidia_ml_py() -> None:
    names = {re.split(r"[^A-Za-z0-9_-]", text)[0].lower() for text in project()["project"]["dependencies"]}
    assert "nvidia-ml-py" in names
    assert "pynvml" not in names


def test_constraints_are_pins_and_name_no_host() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pattern = r'[A-Za-z0-9._-]+==[A-Za-z0-9.]+(; python_version >= "3\.\d+")?'
    assert [line for line in pins if not re.fullmatch(pattern, line)] == []
    assert "torch==2.13.0" in pins


def test_makefile_installs_the_pinned_torch_first() -> None:
    """A resolver left to itself may fetch another build of torch, of several readable."""
    recipe = (ROOT / "Makefile").read_text().split("$(READY): pyproject.toml constraints.txt", 1)[1]
    installs = [line for line in recipe.splitlines() if "$(INSTALL)" in line]
    assert "-c constraints.txt torch==2.13.0" in installs[0]
    assert all("-c constraints.txt" in line for line in installs)


def test_every_dependency_is_pinned_for_ci() -> None:
    """Those that `make setup` asks for by name; the pins of what these need show in a clean install only."""
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    asked = list(project()["project"]["dependencies"])
    for extra in ("torch", "lightning", "demo", "docs", "test", "lint", "dev"):
        asked += project()["project"]["optional-dependencies"][extra]
    names = {re.split(r"[^A-Za-z0-9_-]", text)[0].lower() for text in asked} - {"dlrover-hooks"}
    assert names - {name.replace("_", "-") for name in pinned} == set()
