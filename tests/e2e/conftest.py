"""Fixtures of the tests with real processes."""

from __future__ import annotations

import socket
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_connection
from dlrover_hooks.checkpoint.save import segment_client
from tests import disks, keepers
from tests.e2e.house import House
from tests.e2e.kept import Kept, runtime_folder
from tests.e2e.launched import ALIVE, MEMBER, Launched
from tests.e2e.master_process import LiveMaster
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def memory_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save finds its memory, and is not skipped, however slow the machine."""
    monkeypatch.setattr(segment_client, "PREPARE_WAIT_S", WAIT_S)


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
            launched.end()


@pytest.fixture
def node(launch: Callable[..., Launched]) -> Callable[..., Launched]:
    """Starts the launcher of one node of one job: `node("a", script, *options)`. All meet at one address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    job = f"nodes-{uuid.uuid4().hex[:8]}"

    def start(name: str, script: str, *options: str, **more: Any) -> Launched:
        place = {"DLROVER_HOOKS_NODE": name, "DLROVER_HOOKS_TOKEN": "secret"}
        return launch(script, "--rdzv-endpoint", where, *options, job=job, **place, **more)

    return start


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


@pytest.fixture
def house(live_master: LiveMaster, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """One node's keeper and lives, in that runtime folder."""
    monkeypatch.setattr(keeper_connection, "_spawned", keepers.spawned)
    made = House(live_master)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "disk") as folder:
        yield folder
