"""The versions of Python and of the frameworks that the tests have run with, from compat.toml.

`python -m tests.compatibility .venv-oldest` prints the constraints for pip to build that environment: constraints.txt,
with the environment's own versions in it.
"""

from __future__ import annotations

import datetime
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] - pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
ASKED_AS = {"tensorflow-cpu": "tensorflow"}
"""Distributions that hold the same as the one that an extra asks for."""


@dataclass(frozen=True)
class Environment:
    """One environment: what it holds, the command that runs tests in it, the day of its last run, its versions."""

    holds: str
    command: str
    on: datetime.date
    versions: dict[str, str]


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((ROOT / "tests/compat.toml").read_text())


@cache
def environments() -> dict[str, Environment]:
    """By name of the folder."""
    return {name: Environment(**row) for name, row in _data()["environments"].items()}


def unproven() -> dict[str, str]:
    """What is allowed and not proven, in words. By distribution."""
    return _data()["unproven"]


def proven(name: str) -> dict[Version, list[str]]:
    """The environments in which a distribution, or `python`, was proven; by version, the oldest one first."""
    found: dict[Version, list[str]] = {}
    for place, one in environments().items():
        if name in one.versions:
            found.setdefault(Version(one.versions[name]), []).append(place)
    return dict(sorted(found.items()))


def names() -> list[str]:
    """Everything that has a version in an environment, in the order of the file."""
    return list(dict.fromkeys(name for one in environments().values() for name in one.versions))


def bounds() -> dict[str, Version]:
    """The lower bounds of Python and of what the extras for frameworks ask for, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [f"python{project['requires-python']}"]
    asked += [line for name in ("torch", *_adapters(extras)) for line in extras[name]]
    found = {}
    for one in map(Requirement, asked):
        if one.name not in ("dlrover-hooks", "safetensors"):
            (lowest,) = one.specifier
            assert lowest.operator == ">=", f"{one}: a lower bound, and nothing else"
            found[one.name] = Version(lowest.version)
    return found


def pins() -> dict[str, Version]:
    """The versions of constraints.txt."""
    return {one.name: Version(next(iter(one.specifier)).version) for one in map(Requirement, _pin_lines())}


def constraints(place: str) -> str:
    """The lines of constraints.txt with the versions of the environment `place`."""
    own = environments()[place].versions
    lines = [f"{name}=={own[name]}" if (name := Requirement(line).name) in own else line for line in _pin_lines()]
    return "\n".join(lines) + "\n"


def _pin_lines() -> list[str]:
    return re.findall(r"^[^#\s].*$", (ROOT / "constraints.txt").read_text(), re.M)


def _adapters(extras: dict[str, list[str]]) -> list[str]:
    """The extras that stand for a framework: integrations/ has a module or a package of that name."""
    return [name for name in extras if any((ROOT / "integrations" / f"{name}{end}").exists() for end in ("", ".py"))]


if __name__ == "__main__":
    sys.stdout.write(constraints(sys.argv[1]))
