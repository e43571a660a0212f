"""Fixtures of the tests with real processes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.kept import Kept, runtime_folder
from tests.e2e.launched import ALIVE, MEMBER, Launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts launchers; `member`: the script may speak to the master. What is left of them ends with the test."""
    started: list[Launched] = []

    def start(script: str, *options: str, member: bool = False, **more: str) -> Launched:
        parts = [ALIVE, MEMBER if member else "", script]
        started.append(Launched(tmp_path, "".join(textwrap.dedent(part) for part in parts), *options, **more))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.communicate()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of the test's own, where its keepers' sockets lie."""
    with runtime_folder(monkeypatch) as folder:
        yield folder


@pytest.fixture
def kept(runtime: Path) -> Iterator[Kept]:
    """Starts keepers and trainers; none is left at the end."""
    made = Kept()
    yield made
    made.close()
