"""Starts Python programs that find imported what they need: to import torch and Lightning takes longer than their work.

    python -m tests.warm SOCKET MODULE...

has imported the modules, and forks one process for each order. It has a single thread, and a child of it goes on as
`dlrover_hooks.launcher.warm.worker_bootstrap` does: from there on it is the program, with its environment,
its `__main__`, and its end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from dlrover_hooks.launcher.warm import fork_server, worker_bootstrap
from tests import keepers

_ANSWER_S = 120.0


class Forked:
    """One program. As much of `subprocess.Popen` as tests ask for."""

    def __init__(self, server: Warm, pid: int, outputs: tuple[IO[bytes], IO[bytes]]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server, self._outputs = server, outputs
        self._handle = os.pidfd_open(pid)  # nobody else takes the number: only `wait` reaps

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            ended, _, _ = select.select([self._handle], [], [], timeout)
            if not ended:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._server.order({"reap": self.pid})
            os.close(self._handle)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        self.wait(timeout)
        said: list[str] = []
        for file in self._outputs:
            with file:
                file.seek(0)
                said.append(file.read().decode())
        return said[0], said[1]

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Warm:
    """The server. `env`: what the modules read while they are imported."""

    def __init__(self, modules: Sequence[str], env: dict[str, str]) -> None:
        self._line, theirs = socket.socketpair()
        self._line.settimeout(_ANSWER_S)
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules]
        with theirs:
            self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(
        self,
        arguments: Sequence[str],
        env: dict[str, str],
        outputs: tuple[IO[bytes], IO[bytes]] | None = None,
        *,
        cwd: str = "",
    ) -> Forked:
        """`arguments` as they would follow `python`. Without `outputs` it is `communicate` that tells what it said."""
        outputs = outputs or (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115
        order = {"arguments": list(arguments), "env": env, "cwd": cwd or os.getcwd()}
        return Forked(self, self.order(order, [file.fileno() for file in outputs]), outputs)

    def order(self, order: dict[str, object], files: Sequence[int] = ()) -> int:
        """Have the server do it; its answer."""
        data = json.dumps(order).encode()
        socket.send_fds(self._line, [len(data).to_bytes(4, "big")], files)
        self._line.sendall(data)
        answer = self._line.recv(64)
        assert answer, f"the server of {self._process.args} has ended"
        return int(answer)

    def close(self) -> None:
        """Ends the server; what it forked has ended."""
        self._line.close()
        self._process.wait(_ANSWER_S)


_ENVIRONMENT = ("OMP_NUM_THREADS", "PYTHONPATH", "PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "KERAS_BACKEND")
_latest: dict[tuple[str, ...], Warm] = {}


def warm(modules: Sequence[str], env: dict[str, str]) -> Warm:
    """The server that has imported these. The one before is ended: each holds hundreds of megabytes."""
    key = tuple(modules)
    if key not in _latest:
        close()
        kept = {name: value for name, value in env.items() if name in _ENVIRONMENT}
        _latest[key] = Warm(modules, kept | fork_server.ONE_THREAD)
    return _latest[key]


def close() -> None:
    """At the end of all tests: no server is left."""
    for server in list(_latest.values()):
        server.close()
    _latest.clear()


# ---- the server ------------------------------------------------------------------------------------------------------


def _serve(line: socket.socket) -> list[str]:
    """Returns in each child, with its arguments."""
    while True:
        head, files, _, _ = socket.recv_fds(line, 4, 2)
        if not head:
            sys.exit(0)
        order = json.loads(_exactly(line, int.from_bytes(head, "big")))
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            line.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            os.setsid()
            line.close()
            os.chdir(order["cwd"])
            _become(order["env"], files)
            return order["arguments"]
        for file in files:
            os.close(file)
        while os.getsid(pid) != pid:  # a caller that kills its group at once is to find it
            os.sched_yield()
        line.sendall(str(pid).encode())


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += line.recv(size - len(data))
    return data


def _become(env: dict[str, str], files: list[int]) -> None:
    for descriptor, file in enumerate(files, 1):
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    keepers.forked()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as line:
        for module in sys.argv[2:]:
            importlib.import_module(module)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{sys.argv[2:]} started {len(threads) - 1} threads"
        gc.freeze()
        arguments = _serve(line)
    what = worker_bootstrap.program(arguments)
    worker_bootstrap.forget_cwd()
    worker_bootstrap.enter(what)
    worker_bootstrap._correct_ranks()
    worker_bootstrap.run(what)


if __name__ == "__main__":
    main()
