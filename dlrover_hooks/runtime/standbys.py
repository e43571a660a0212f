"""The launcher's warm standbys: idle processes that have imported everything, one of which becomes a worker at once."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from dlrover_hooks.runtime import child as children
from dlrover_hooks.runtime.child import Child, described
from dlrover_hooks.runtime.parent import adopt_orphans, bury_orphans
from dlrover_hooks.runtime.standby import Order

log = logging.getLogger("dlrover_hooks.run")

_STARTS = 3
"""A server that has died so often will not serve."""
_SEND_S = 2.0
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""While the server imports: NumPy's BLAS would start threads, `torch.cuda.is_available()` would initialise CUDA."""


class Standbys:
    """Keeps `count` standbys ready. Nothing here blocks but the moment in which one is taken. Main thread only.

    Makes this process the parent of all orphans below it: call `refill` at every turn of its loop, which buries them.

    Args:
        count: how many wait, ready to be taken.
        preload: the file that the workers find in DLROVER_HOOKS_PRELOAD: nothing is started before one has written it.
        environment: of the workers, but for what differs from one to the next.
    """

    def __init__(self, count: int, preload: str, environment: Mapping[str, str]) -> None:
        self._count, self._preload, self._environment = count, preload, {**environment, **_ONE_THREAD}
        self._server: Child | None = None
        self._line: socket.socket | None = None
        self._starts, self._ordered = 0, 0
        self._coming: list[socket.socket] = []
        self._ready: list[tuple[Standby, socket.socket]] = []
        adopt_orphans()

    @property
    def ready(self) -> int:
        """So many could be taken now."""
        self._hear()
        return len(self._ready)

    def refill(self) -> None:
        """Start what is missing."""
        bury_orphans(children.ALIVE)
        self._hear()
        if self._server is None and self._starts < _STARTS and os.path.exists(self._preload):
            self._start()
        missing = self._count - self._ordered - len(self._coming) - len(self._ready)
        if self._line is not None:
            with contextlib.suppress(OSError):
                for _ in range(missing):
                    self._line.send(b"fork")
                    self._ordered += 1

    def take(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, stdout: int = 1, stderr: int = 2,
        words: Sequence[int] = (),
    ) -> Child | None:  # fmt: skip
        """A standby that now runs `[-m] script args`, the part of `command` behind its "--"; None if none is ready.

        `words`: the descriptor for its last words, if there is one.
        """
        self._hear()
        order = Order(list(command[command.index("--") + 1 :]), dict(env), os.getcwd())
        body = msgspec.json.encode(order)
        with open(os.devnull, "rb") as nothing:
            while self._ready:
                standby, line = self._ready.pop(0)
                with line:
                    try:
                        line.settimeout(_SEND_S)
                        files = [nothing.fileno(), stdout, stderr, *words]
                        socket.send_fds(line, [len(body).to_bytes(4, "big")], files)
                        line.sendall(body)
                    except OSError as error:
                        log.warning("a standby could not take the seat of %s (%s)", name, error)
                        standby.end()
                        continue
                standby.name, standby.started_at = name, time.monotonic()
                return standby
        return None

    def close(self) -> None:
        """End the server and whoever is still waiting. Those that were taken run on."""
        for line in self._coming:
            line.close()
        for standby, line in self._ready:
            line.close()
            standby.end()
        if self._server is not None:
            self._server.end()
        if self._line is not None:
            self._line.close()
        self._coming, self._ready, self._server, self._line, self._count = [], [], None, None, 0
        bury_orphans(children.ALIVE)

    # ---- within -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        arguments = [str(theirs.fileno()), str(os.getpid()), self._preload, ""]
        command = [sys.executable, "-u", "-m", "dlrover_hooks.runtime.standby", *arguments]
        with theirs:
            self._server = Child(
                "standby server", command, env=self._environment, pass_fds=(theirs.fileno(),), die_with_parent=True
            )
        self._starts, self._ordered = self._starts + 1, 0

    def _hear(self) -> None:
        """Who has come, who is ready, who has died."""
        self._hear_server()
        for line in list(self._coming):
            if (said := _said(line)) is None:
                continue
            self._coming.remove(line)
            if said:
                self._ready.append((Standby(int(said)), line))
            else:
                line.close()
        for standby, line in list(self._ready):
            if standby.exit_code() is not None:
                self._ready.remove((standby, line))
                line.close()
                standby.reap()

    def _hear_server(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while self._line is not None:
                said, files, _, _ = socket.recv_fds(self._line, 4096, 1)
                if files:
                    self._coming.append(socket.socket(fileno=files[0]))
                    self._ordered -= 1
                elif said:
                    log.info("%s", said.decode())
                else:
                    break
        if self._server is not None and (code := self._server.exit_code()) is not None:
            left = "restarting it" if self._starts < _STARTS else "no more standbys"
            log.warning("the standby server died (%s); %s", described(code), left)
            self._server.reap()
            assert self._line is not None
            self._line.close()
            self._server = self._line = None


def _said(line: socket.socket) -> bytes | None:
    """What a standby said; None: nothing yet; b"": it is gone."""
    try:
        return line.recv(32, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Standby(Child):
    """A child by adoption, which this process did not start itself."""

    def __init__(self, pid: int) -> None:
        self.name, self.started_at, self.pid = "a standby", time.monotonic(), pid
        self._pidfd = os.pidfd_open(pid)
        self._process = _Adopted(pid, self._pidfd)
        children.ALIVE.add(pid)


class _Adopted:
    """What `Child` wants of a `Popen`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a standby", timeout or 0.0)
        return code
