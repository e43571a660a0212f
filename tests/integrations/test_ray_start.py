"""A job on a cluster that `ray start` has made, by the commands of docs/operate/ray.md."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks.host.ports import free_port
from tests.integrations import ray_deployed
from tests.integrations.ray_nodes import REPOSITORY
from tests.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STARTED = "Ray runtime started"
MORE = "--block --num-cpus 2 --include-dashboard false --disable-usage-stats"
"""What a test adds to `ray start`: it owns the processes, and needs no dashboard."""


def documented(page: str, heading: str) -> list[str]:
    """The commands of the first console block below a heading of a page."""
    part = (REPOSITORY / "docs" / page).read_text().split(f"## {heading}\n")[1]
    block = re.search(r"```console\n(.*?)```", part, re.DOTALL)
    assert block is not None
    return [line.removeprefix("$ ") for line in block[1].splitlines()]


class Machines:
    """Processes that act as machines: they share a home, as if its files had been copied, and no other Ray's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        self.env = {**kept, "HOME": str(folder), "RAY_TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.started: list[subprocess.Popen[bytes]] = []

    def ends(self, command: str, timeout_s: float = 120.0) -> None:
        """Run it to its end."""
        done = subprocess.run(
            shlex.split(command), env=self.env, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"

    def start(self, command: str) -> None:
        """Start a machine with it, and wait until Ray runs there."""
        log = self.folder / f"machine-{len(self.started)}.log"
        with log.open("wb") as file:
            made = subprocess.Popen(
                shlex.split(command), env=self.env, stdout=file, stderr=file, start_new_session=True
            )
        self.started.append(made)
        until(lambda: STARTED in log.read_text() or made.poll() is not None, command, 120.0)
        assert STARTED in log.read_text(), log.read_text()[-4000:]

    def close(self) -> None:
        for one in reversed(self.started):
            with contextlib.suppress(ProcessLookupError):  # it has failed
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.fixture
def machines() -> Iterator[Machines]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray has sockets in it, whose paths may not be long
    made = Machines(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.requirement("DL-14")
def test_a_job_runs_on_machines_that_the_documented_commands_have_started(machines: Machines) -> None:
    port = str(free_port())
    token, mode, head, other, script = (
        line.replace("HEAD", "127.0.0.1").replace("6379", port)
        for line in documented("operate/ray.md", "On bare metal")
    )
    machines.ends(token)
    name, value = mode.removeprefix("export ").split("=")
    machines.env[name] = value
    machines.start(f"{head} {MORE}")
    machines.start(f"{other} {MORE.replace('--include-dashboard false ', '')}")
    address, _, command = script.partition(" ")
    name, value = address.split("=")
    machines.env[name] = value
    machines.ends(command.replace("train.py", f"-m {ray_deployed.MODULE}"))
