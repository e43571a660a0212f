"""A real master process for tests: on a listening socket of the test, so that it can be killed and come back unseen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests

from dlrover_hooks.client import MasterClient
from tests.waiting import WAIT_S, until


class LiveMaster:
    """`python -m dlrover_hooks.master` with a journal at `folder`; `kill` is SIGKILL, `restart` the next life."""

    def __init__(self, folder: Path, *flags: str, token: str | None = "secret", journal: Path | None = None) -> None:
        self.token, self.flags = token, flags
        self.journal = journal or folder / "master.db"
        self.log = folder / "master.log"
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._life_read, self._life_end = os.pipe()
        self._clients: dict[str, MasterClient] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.restart()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def restart(self) -> None:
        """Start the next life and wait until it answers."""
        fd = self.listener.fileno()
        command = [sys.executable, "-m", "dlrover_hooks.master", "--fd", str(fd), "--journal", str(self.journal)]
        command += ["--life-fd", str(self._life_read), *self.flags]
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
        if self.token:
            env["DLROVER_HOOKS_TOKEN"] = self.token
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, pass_fds=(fd, self._life_read), env=env, stderr=log, stdout=log, start_new_session=True
            )
        assert requests.get(self.url + "/healthz", timeout=60).json()["pid"] == self.pid, self.log.read_text()

    def client(self, incarnation: str, *, deadline_s: float = 60.0) -> MasterClient:
        """The client of that incarnation; closed with the master."""
        if incarnation not in self._clients:
            self._clients[incarnation] = MasterClient(
                self.url, self.token, incarnation=incarnation, deadline_s=deadline_s
            )
        return self._clients[incarnation]

    def await_connections(self, job: str, count: int | None = None) -> None:
        """Until `count` (None: all) members of its round are connected: the master detects the end of others only after
        their lease.
        """
        until(
            lambda: float(self._members(job, "connected")) == (count or float(self._members(job, "alive"))),
            f"the connections of {job}",
        )

    def _members(self, job: str, state: str) -> str:
        token = {"Authorization": f"Bearer {self.token}"}
        metrics = requests.get(f"{self.url}/metrics", headers=token, timeout=WAIT_S).text
        series = f'dlrover_hooks_members_{state}{{job="{job}"}} '
        return next(line.removeprefix(series) for line in metrics.splitlines() if line.startswith(series))

    def kill(self) -> None:
        """SIGKILL, reaped."""
        self._end(signal.SIGKILL)

    def terminate(self) -> tuple[int, float]:
        """SIGTERM. Returns the exit code and the seconds it took."""
        began = time.monotonic()
        return self._end(signal.SIGTERM), time.monotonic() - began

    def _end(self, signum: int) -> int:
        assert self._process is not None
        self._process.send_signal(signum)
        return self._process.wait(60)

    def end_life(self) -> int:
        """Close the owner's end of the life pipe."""
        assert self._process is not None
        os.close(self._life_end)
        self._life_end = -1
        return self._process.wait(60)

    def close(self) -> None:
        """Everything of this fixture ends."""
        for client in self._clients.values():
            client.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for fd in (self._life_read, self._life_end):
            if fd >= 0:
                os.close(fd)
        self.listener.close()
