"""Real Brain processes for tests: on a listening socket of the test, so that one can be killed and come back unseen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import requests

from tests.waiting import WAIT_S, until


def environment(plug_ins: Path | None = None) -> dict[str, str]:
    """Without the settings of this process; with a folder of plug-ins."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
    if plug_ins is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(plug_ins), env.get("PYTHONPATH", str(Path.cwd()))])
    return env


def plug_in(folder: Path, name: str, body: str) -> Path:
    """Installs `def algorithm(job, history, cluster, config)` with that body as the plug-in `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / f"plug_in_{name}.py").write_text(
        f"from dlrover_hooks.master.brain.records import Proposal\nfrom dlrover_hooks.protocol import *\n\n\n"
        f"def algorithm(job, history, cluster, config):\n{lines}"
    )
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dlrover_hooks.brain_algorithms]\n{name} = plug_in_{name}:algorithm\n")
    return folder


class BrainProcess:
    """`python -m dlrover_hooks.master.brain` on `database`; `kill` is SIGKILL, `restart` the next life."""

    def __init__(self, folder: Path, database: str, *flags: str, plug_ins: Path | None = None) -> None:
        self._database, self._flags, self._environment = database, flags, environment(plug_ins)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.log = folder / f"brain-{self.listener.getsockname()[1]}.log"
        self.restart()

    def restart(self) -> None:
        """Start the next life and wait until it answers."""
        fd = self.listener.fileno()
        command = [sys.executable, "-m", "dlrover_hooks.master.brain", "--database", self._database, "--fd", str(fd)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags], pass_fds=(fd,), env=self._environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        until(self._ready, "the Brain", diagnostic=self.log.read_text)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return requests.get(self.url + "/readyz", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """SIGKILL, reaped."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(WAIT_S)

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self.kill()
        self.listener.close()
