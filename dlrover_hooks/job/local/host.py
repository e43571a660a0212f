"""The parent process of a local job's PrimeMaster, SubMasters and workers. It does what Ray does on a cluster.

    python -m dlrover_hooks.job.local.host FOLDER --life-fd N

It starts and kills processes on request, reports how they end, and starts the PrimeMaster again. All other processes
end with it. It ends when the process at the other end of its pipe N ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import LaunchError
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.host.ports import listen
from dlrover_hooks.host.wake_pipe import WakePipe
from dlrover_hooks.job.local.socket_calls import CallServer

log = logging.getLogger("dlrover_hooks.job")

PRIME = "prime"
PRIME_MODULE = "dlrover_hooks.job.local.prime"
_EARLY_S, _EARLY_ENDS, _PAUSE_S = 5.0, 5, 0.2
_MOST_ENDS = 10_000


class EndedProcess(msgspec.Struct, frozen=True):
    """`number`: counts all ends from 1. `code`: exit code, negative for a signal. `killed`: it ended by `kill`."""

    number: int
    name: str
    code: int
    killed: bool


class ProcessHost:
    """Starts, kills and watches the processes of a job. Main thread only; requests arrive on threads of its socket.

    Args:
        folder: folder of the job, where it serves a Unix socket.
        life_fd: reading end of a pipe; at end of file all processes are killed. None: no pipe.
    """

    def __init__(self, folder: str, life_fd: int | None) -> None:
        self.folder, self._life_fd = folder, life_fd
        self._selector = selectors.DefaultSelector()
        self._wake = WakePipe(self._selector)
        self._children = dict[str, Child]()
        self._killed = set[str]()
        self._orders: list[tuple[str, list[Any], Future[Any]]] = []
        self._ends = list[EndedProcess]()
        self._changed = threading.Condition()
        self._finished = threading.Event()
        self._listener = listen(0)
        self._early_ends = 0
        self._prime_due: float | None = 0.0

    @property
    def url(self) -> str:
        """URL of the HTTP master."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> int:
        """Block until the job is over; returns the exit code.

        Raises LaunchError if the PrimeMaster failed too often directly after its start.
        """
        server = CallServer(host_socket(self.folder), self._answer)
        if self._life_fd is not None:
            self._selector.register(self._life_fd, selectors.EVENT_READ, "life")
        try:
            while not self._finished.is_set():
                self._start_prime()
                timeout_s = None if self._prime_due is None else max(0.0, self._prime_due - time.monotonic())
                for key, _ in self._selector.select(timeout_s):
                    if key.data == "life" and not os.read(key.fd, 1024):
                        log.warning("the process that submitted the job has ended: ending the job")
                        shutil.rmtree(self.folder, ignore_errors=True)
                        return 1
                self._wake.drain()
                self._carry_out()
                self._look()
            return 0
        finally:
            server.close()
            for child in self._children.values():
                child.end()
            self._listener.close()

    def _start_prime(self) -> None:
        if self._prime_due is None or time.monotonic() < self._prime_due:
            return
        self._prime_due = None
        fd = self._listener.fileno()
        command = [sys.executable, "-m", PRIME_MODULE, self.folder, "--fd", str(fd)]
        self._begin(PRIME, command, {}, (fd,))

    def _begin(self, name: str, command: list[str], env: dict[str, str], fds: tuple[int, ...] = ()) -> int:
        child = Child(name, command, env=settings.worker_environment(**env), pass_fds=fds, die_with_parent=True)
        self._children[name] = child
        self._selector.register(child, selectors.EVENT_READ, "child")
        return child.pid

    def _look(self) -> None:
        """Reap the processes that have ended."""
        for name, child in list(self._children.items()):
            if child.exit_code() is not None:
                self._gone(name)

    def _gone(self, name: str) -> None:
        """Kill what still runs in the session of a process, and record its end."""
        child = self._children.pop(name)
        self._selector.unregister(child)
        code = child.end()
        if name == PRIME:
            early = time.monotonic() - child.started_at < _EARLY_S
            self._early_ends = self._early_ends + 1 if early and code > 0 else 0
            if self._early_ends >= _EARLY_ENDS:
                raise LaunchError(f"the PrimeMaster ended with {described(code)}", hint="see its message above")
            log.warning("the PrimeMaster ended (%s); starting it again", described(code))
            self._prime_due = time.monotonic() + (_PAUSE_S if early else 0.0)
            return
        with self._changed:
            number = self._ends[-1].number + 1 if self._ends else 1
            self._ends.append(EndedProcess(number, name, code, name in self._killed))
            del self._ends[:-_MOST_ENDS]
            self._killed.discard(name)
            self._changed.notify_all()

    def _carry_out(self) -> None:
        with self._changed:
            orders, self._orders = self._orders, []
        for function, arguments, answer in orders:
            try:
                answer.set_result(getattr(self, f"_{function}")(*arguments))
            except Exception as error:
                answer.set_exception(error)

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> int:
        """Start a process, unless one of this name runs; returns its pid."""
        running = self._children.get(name)
        return running.pid if running is not None else self._begin(name, command, env)

    def _kill(self, name: str) -> None:
        if name in self._children:
            self._killed.add(name)
            self._gone(name)

    def _running(self, prefix: str) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items() if name.startswith(prefix)}

    def _finish(self) -> None:
        for name in [one for one in self._children if one != PRIME]:
            self._kill(name)
        self._finished.set()

    # ---- the socket: threads of `CallServer` -------------------------------------------------------------------------

    def _answer(self, function: str, arguments: list[Any], within_s: float) -> Any:
        if function == "ended":
            return self._await_ends(*arguments)
        if function == "url":
            return self.url
        if function not in ("start", "kill", "running", "finish"):
            raise LaunchError(f"there is no function {function!r}")
        answer: Future[Any] = Future()
        with self._changed:
            self._orders.append((function, arguments, answer))
        self._wake.wake()
        return answer.result(min(30.0, within_s))

    def _await_ends(self, prefix: str, after: int, timeout_s: float) -> list[list[Any]]:
        """Ends after number `after` of processes whose names begin with `prefix`; waits for the first one."""

        def found() -> list[list[Any]]:
            return [
                [one.number, one.name, one.code, one.killed]
                for one in self._ends
                if one.number > after and one.name.startswith(prefix)
            ]

        with self._changed:
            self._changed.wait_for(found, timeout_s)
            return found()


def host_socket(folder: str) -> str:
    """Path of the socket of a job's host."""
    return os.path.join(folder, "host")


def main() -> None:
    """Entry point of the module."""
    parser = argparse.ArgumentParser(prog="dlrover_hooks.job.local.host", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--life-fd", type=int)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the process that submitted the job stops it
    sys.exit(ProcessHost(options.folder, options.life_fd).run())


if __name__ == "__main__":
    main()
