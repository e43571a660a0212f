"""Real torchrun agents under test, and what their workers wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.e2e.launched import REPOSITORY, all_gone
from tests.waiting import WAIT_S, json_lines, until

Lives = list[dict[str, Any]]


@cache
def metadata() -> str:
    """A folder with what an installation of this tree says of itself: there torch finds the entry point.

    Made by the build backend from pyproject.toml, as pip does it; a package that is installed for development may have
    been installed before the entry point was there.
    """
    folder = mkdtemp(prefix="dlrover-hooks-metadata-")
    code = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=REPOSITORY, check=True, capture_output=True)
    return folder


def torchrun(*arguments: str, conf: str = "", backend: str = "dlrover") -> list[str]:
    """Its command line, one worker per node; `conf`: of --rdzv-conf."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={backend}", "--nproc-per-node=1"]
    return command + ([f"--rdzv-conf={conf}"] if conf else []) + list(arguments)


def environment(**more: str) -> dict[str, str]:
    """Of an agent: without this process's settings, with the entry point."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    return own | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{metadata()}", "OMP_NUM_THREADS": "1"} | more


class Torchruns:
    """Agents of one job, by node. Workers append JSON lines to `lives`, with `ev` (what happened) in each."""

    def __init__(
        self, folder: Path, endpoint: str, script: str, *flags: str, backend: str = "dlrover", conf: str = "",
        token: str | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.token, self.port = folder, token, int(endpoint.rpartition(":")[2])
        self.lives, self.stop = folder / "lives.jsonl", folder / "stop"
        self.lives.touch()
        path = folder / "train.py"
        path.write_text(textwrap.dedent(script))
        flags = (f"--rdzv-endpoint={endpoint.removeprefix('http://')}", *flags)
        self.command = torchrun(*flags, str(path), str(self.lives), str(self.stop), conf=conf, backend=backend)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, **env: str) -> None:
        """An agent as if on a machine called `node`."""
        env = environment(DLROVER_HOOKS_NODE=node, DLROVER_HOOKS_TOKEN=self.token or "", **env)
        with (self.folder / f"{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(self.command, env=env, cwd=self.folder, stdout=log, stderr=log)

    def read(self) -> Lives:
        return json_lines(self.lives)

    def wait_for(self, condition: Callable[[Lives], Any], timeout_s: float = 120.0) -> Any:
        """What `condition` gives, as soon as it is true."""
        return until(
            lambda: condition(self.read()), "what the workers write", timeout_s,
            diagnostic=lambda: (self.read()[-20:], self.logs()),
        )  # fmt: skip

    def training(self, world: int, after: int = 0, timeout_s: float = 120.0) -> dict[str, dict[str, Any]]:
        """By node, the life that trains in a world of that size, once all ranks do. `after`: lines to leave out."""

        def found(lives: Lives) -> dict[str, dict[str, Any]]:
            mine = [life for life in lives[after:] if life["ev"] == "step" and life["world"] == world]
            mine = [life for life in mine if life["port"] == mine[-1]["port"]]  # each round has a port of its own
            return {life["node"]: life for life in mine if len({one["rank"] for one in mine}) == world}

        return self.wait_for(found, timeout_s)

    def kill(self, node: str) -> None:
        """As a machine is lost: agent and worker, with SIGKILL."""
        self.kill_worker(node, agent=True)

    def kill_worker(self, node: str, *, agent: bool = False) -> None:
        """It is gone when this returns."""
        if agent:
            self.agents[node].send_signal(signal.SIGKILL)
        pid = [life["pid"] for life in self.read() if life["node"] == node][-1]
        os.kill(pid, signal.SIGKILL)
        assert all_gone([pid])
        if agent:
            self.agents.pop(node).wait(10)

    def end(self, timeout_s: float = WAIT_S) -> dict[str, int]:
        """Let training end; exit codes of the agents that are left."""
        self.stop.touch()
        return {node: agent.wait(timeout_s) for node, agent in self.agents.items()}

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        """Nothing is left, even of agents that were killed."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait(10)
        for life in self.read():
            try:
                os.kill(life["pid"], signal.SIGKILL)
            except ProcessLookupError:
                continue
