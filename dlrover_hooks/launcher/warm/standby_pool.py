"""The launcher's warm standbys: idle processes that have imported everything; each can become a worker at once."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from dlrover_hooks.host import child_process as children, memory_limit
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.host.parent_death import adopt_orphans, reap_orphans
from dlrover_hooks.launcher.warm.fork_server import NO_FORK, ONE_THREAD, StandbyOrder

log = logging.getLogger("dlrover_hooks.run")

_STARTS = 3
"""A server that has died this often is not started again."""
_SEND_S = 2.0
_UNTOLD_S = 20.0
"""Seconds after the first worker's start at which the server starts without a worker's list of imports."""
_AGAIN_S = 5.0
"""Interval between two checks of the memory, and pause after a failed fork."""
_START_BYTES, _KEEP_BYTES = 1 << 30, 1 << 28
"""Free memory needed to start and to keep the server. A server with torch and Lightning takes a third of the first."""


class Standbys:
    """Keeps `count` standbys ready. Only `take` may block, briefly. Main thread only.

    Makes this process adopt all orphaned descendants: call `refill` at every turn of its loop, which reaps them.

    Args:
        count: number of standbys to keep ready.
        preload: the file named in DLROVER_HOOKS_PRELOAD, where a worker writes the list of its imports.
        environment: of the workers, except for variables that differ between them.
        script: `[-m] script args`; its source is read for imports if no worker writes a list in time.
        spare: keep standbys only while there is spare memory.
    """

    def __init__(
        self, count: int, preload: str, environment: Mapping[str, str], script: Sequence[str] = (), *,
        spare: bool = False,
    ) -> None:  # fmt: skip
        self._count, self._preload, self._environment = count, preload, {**environment, **ONE_THREAD}
        self._script, self._spare = script, spare
        self._server: Child | None = None
        self._line: socket.socket | None = None
        self._starts, self._ordered, self._told = 0, 0, False
        self._coming: list[socket.socket] = []
        self._ready: list[tuple[Standby, socket.socket]] = []
        self._untold_until = math.inf
        self._fork_at, self._look_at = 0.0, 0.0
        self._room, self._said_short, self._said_cost = True, False, False
        adopt_orphans()

    @property
    def ready(self) -> int:
        """Number of standbys that could be taken now."""
        self._hear()
        return len(self._ready)

    def refill(self) -> None:
        """Start missing standbys."""
        _reap_others()
        self._hear()
        if not self._has_room():
            return
        if not self._told and os.path.exists(self._preload):
            self._stop()  # it has only the imports found in the script's source
            self._told, self._starts = True, 0
        if self._server is None and self._starts < _STARTS and (self._told or time.monotonic() > self._untold_until):
            self._start()
        missing = self._count - self._ordered - len(self._coming) - len(self._ready)
        if self._line is not None and time.monotonic() > self._fork_at:
            with contextlib.suppress(OSError):
                for _ in range(missing):
                    self._line.send(b"fork")
                    self._ordered += 1
        if len(self._ready) == self._count and not self._said_cost:
            self._say_cost()

    def take(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, stdout: int = 1, stderr: int = 2,
        error_pipe: Sequence[int] = (),
    ) -> Child | None:  # fmt: skip
        """A standby that now runs `[-m] script args`, the part of `command` after its "--"; None if none is ready.

        `error_pipe`: the descriptor of its error pipe, if there is one.
        """
        self._hear()
        if self._untold_until == math.inf:
            self._untold_until = time.monotonic() + _UNTOLD_S
        order = StandbyOrder(list(command[command.index("--") + 1 :]), dict(env), os.getcwd())
        body = msgspec.json.encode(order)
        with open(os.devnull, "rb") as nothing:
            while self._ready:
                standby, line = self._ready.pop(0)
                with line:
                    try:
                        line.settimeout(_SEND_S)
                        files = [nothing.fileno(), stdout, stderr, *error_pipe]
                        socket.send_fds(line, [len(body).to_bytes(4, "big")], files)
                        line.sendall(body)
                    except OSError as error:
                        log.warning("a standby could not take the rank of %s (%s)", name, error)
                        standby.end()
                        continue
                standby.name, standby.started_at = name, time.monotonic()
                return standby
        return None

    def close(self) -> None:
        """End the server and the idle standbys. Those that were taken continue."""
        self._stop()
        self._count = 0
        _reap_others()

    # ---- within -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._starts, self._ordered = self._starts + 1, 0
        try:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._line.setblocking(False)
            arguments = [str(theirs.fileno()), str(os.getpid()), self._preload, "", *self._script]
            command = [sys.executable, "-u", "-m", "dlrover_hooks.launcher.warm.fork_server", *arguments]
            with theirs:
                self._server = Child(
                    "standby server", command, env=self._environment, pass_fds=(theirs.fileno(),), die_with_parent=True
                )
        except OSError as error:
            log.warning("the standby server cannot be started (%s)", error.strerror)
            self._stop()

    def _stop(self) -> None:
        """End the server and the idle standbys."""
        for line in self._coming:
            line.close()
        for standby, line in self._ready:
            line.close()
            standby.end()
        if self._server is not None:
            self._server.end()
        if self._line is not None:
            self._line.close()
        self._coming, self._ready, self._server, self._line = [], [], None, None

    def _has_room(self) -> bool:
        """False while memory is short; the standbys are ended meanwhile."""
        if not self._spare or time.monotonic() < self._look_at:
            return self._room
        self._look_at, free = time.monotonic() + _AGAIN_S, memory_limit.free()
        self._room = free.nbytes >= (_START_BYTES if self._server is None else _KEEP_BYTES)
        if not self._room:
            if not self._said_short:
                log.warning(
                    "no warm standbys: memory is short, %s are left (%s). A worker that dies is replaced by a cold "
                    "start, which takes some seconds",
                    _mib(free.nbytes), free.where,
                )  # fmt: skip
            self._said_short = True
            self._stop()
        return self._room

    def _say_cost(self) -> None:
        assert self._server is not None
        cost = 0
        for child in (self._server, *(standby for standby, _ in self._ready)):
            with contextlib.suppress(psutil.Error):
                cost += psutil.Process(child.pid).memory_full_info().pss
        ready = "1 warm standby is" if self._count == 1 else f"{self._count} warm standbys are"
        log.info("%s ready to replace workers at once, for %s of memory (--standby 0: none)", ready, _mib(cost))
        self._said_cost = True

    def _hear(self) -> None:
        """Process messages of the server and of new standbys, and reap dead ones."""
        self._hear_server()
        for line in list(self._coming):
            if (said := _said(line)) is None:
                continue
            self._coming.remove(line)
            pid, pidfd = said
            if pidfd:
                self._ready.append((Standby(int(pid), pidfd[0]), line))
            else:  # it has ended, or this process has reached its limit of open files
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
                elif said == NO_FORK:
                    self._ordered, self._fork_at = self._ordered - 1, time.monotonic() + _AGAIN_S
                elif said:
                    log.info("%s", said.decode())
                else:
                    break
        if self._server is not None and (code := self._server.exit_code()) is not None:
            if code == 0:  # there is nothing to import, or forking is unsafe
                self._starts = _STARTS
            else:
                left = "restarting it" if self._starts < _STARTS else "no more standbys"
                log.warning("the standby server died (%s); %s", described(code), left)
            self._server.reap()
            assert self._line is not None
            self._line.close()
            self._server = self._line = None


def _reap_others() -> None:
    with children.STARTING:
        reap_orphans(children.ALIVE)


def _said(line: socket.socket) -> tuple[bytes, list[int]] | None:
    """A standby's message, with its descriptor; None: nothing yet; an empty message: it is gone."""
    try:
        said, files, _, _ = socket.recv_fds(line, 32, 1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b"", []
    return said, files


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


class Standby(Child):
    """An adopted child, which this process did not start itself. It may have ended before its message is read."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.name, self.started_at, self.pid = "a standby", time.monotonic(), pid
        self._pidfd = pidfd
        self._process = _Adopted(pid, pidfd)
        children.ALIVE.add(pid)


class _Adopted:
    """The part of `subprocess.Popen` that `Child` needs."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        self._code: int | None = None
        try:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # already reaped, before its message was read; the pid may be reused by now
            self._code = -signal.SIGKILL

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # given up by `Child.reap`, and reaped since
                self._code = -signal.SIGKILL
            else:
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
