"""What the manual says of versions is what the tests have run with, and pip accepts nothing older."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version

from tests import compatibility
from tests.manual import DOCS, tables

ROOT = compatibility.ROOT
FRAMEWORKS = [name for name in compatibility.names() if name != "python"]
BOUNDS = compatibility.bounds()


def rows() -> list[list[str]]:
    """The cells of the first table, without the head."""
    lines = tables("_compatibility")["versions_table"].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_newest_version_proven_is_the_one_that_ci_installs(name: str) -> None:
    assert max(compatibility.proven(name)) == compatibility.pins()[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_lower_bound_is_the_oldest_version_proven(name: str) -> None:
    """Unless the page says that what lies between is not proven."""
    same = {asked: ours for ours, asked in compatibility.ASKED_AS.items()}
    oldest = min(compatibility.proven(same.get(name, name)))
    assert BOUNDS[name] == oldest or (BOUNDS[name] < oldest and compatibility.unproven()[name])


def test_nothing_is_called_unproven_that_is_proven() -> None:
    for name in compatibility.unproven():
        assert BOUNDS[name] < min(compatibility.proven(name)), name


def test_the_tests_run_with_versions_that_the_page_names() -> None:
    """All of one environment: this one has the newest, or the oldest, or it is Keras' own."""
    wrong = {}
    for place, one in compatibility.environments().items():
        wrong[place] = {name: found for name, said in one.versions.items() if (found := _installed(name)) != said}
    assert {} in wrong.values(), f"update tests/compat.toml after a run of the tests with these versions: {wrong}"


def test_what_make_installs_for_an_environment_has_its_versions() -> None:
    for place, one in compatibility.environments().items():
        lines = compatibility.constraints(place).splitlines()
        assert [f"{name}=={said}" for name, said in one.versions.items() if name != "python"] == [
            line.split(";")[0] for name in one.versions for line in lines if re.split("[=;]", line)[0] == name
        ], place
        assert len(lines) == len(compatibility.pins())


def test_each_command_is_a_target_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for one in compatibility.environments().values():
        make, *targets = one.command.split()
        assert make == "make"
        assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


def test_the_page_has_a_row_for_each_framework_and_includes_every_table() -> None:
    assert [row[1:3] for row in rows()] == [
        [str(min(found)), str(max(found))] for found in map(compatibility.proven, compatibility.names())
    ]
    assert [row[4] for row in rows() if row[4]] == list(compatibility.unproven().values())
    page = (DOCS / "compatibility.md").read_text()
    assert [name for name in tables("_compatibility") if f"{{{{ {name} }}}}" not in page] == []


def test_other_pages_name_the_newest_version_as_proven() -> None:
    """ "Proven with Lightning 2.6.6": the versions in these sentences, as precise as they are."""
    words = {"tf_keras": "tf-keras", "tensorflow": "tensorflow-cpu"}
    seen = set()
    for page in DOCS.glob("*.md"):
        for sentence in re.findall(r"Proven with (.+?)(?=\. |\.\n| on CPU)", page.read_text(), re.S):
            for word, said in re.findall(r"(\w+) (\d+(?:\.\d+)+)", sentence):
                name: str = word.lower()
                newest = max(compatibility.proven(words.get(name) or name))
                assert newest.release[: said.count(".") + 1] == Version(said).release, f"{page.name}: {word} {said}"
                seen.add(name)
    assert seen >= {"lightning", "accelerate", "transformers", "keras", "torch", "jax", "tensorflow", "tf_keras"}


def test_the_page_on_installing_names_the_lower_bounds() -> None:
    named = dict(re.findall(r"`([a-z]+)>=([\d.]+)`", (DOCS / "install.md").read_text()))
    for other in ("safetensors", "scipy", "sqlalchemy", "alembic", "kubernetes"):  # no framework
        del named[other]
    assert {name: Version(said) for name, said in named.items()} == {n: b for n, b in BOUNDS.items() if n != "python"}


def _installed(name: str) -> str | None:
    if name == "python":
        return ".".join(map(str, sys.version_info[:2]))
    try:
        return Version(version(name)).public
    except PackageNotFoundError:
        return None
