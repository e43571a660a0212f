"""Keepers that find imported what they need: to start Python for one takes longer than a short run of training.

    python -m tests.keepers SOCKET ROOM

forks a keeper for each order, with the arguments and the environment that it would have been started with, and answers
when it is detached. It has one thread, and ends with its standard input. ROOM makes its command line as long as that of
any keeper, which is written over it: tests find by it what a job has left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrover_hooks.checkpoint.ipc import keeper_connection

WHERE = "TESTS_KEEPERS"
"""Names the server's socket to this process and those below it."""
_ROOM = 1000
_ANSWER_S = 60.0
_start = keeper_connection._spawned


class Detached:
    """As much of `Popen` as is asked of a keeper's start: by then it is over."""

    def wait(self, timeout: float) -> int:
        return 0


def spawned(job: str, node: str, linger_s: float) -> Any:
    """In place of `link._spawned`, where a server runs."""
    if (path := os.environ.get(WHERE)) is None:
        return _start(job, node, linger_s)
    arguments = ["--detach", "--job", job, "--node", node, "--linger-s", str(linger_s)]
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_ANSWER_S)
        line.connect(path)
        line.sendall(json.dumps({"arguments": arguments, "env": dict(os.environ)}).encode() + b"\n")
        assert line.recv(1), "the server of keepers has ended"
    return Detached()


def forked() -> None:
    """From here on, in this process, where a server runs."""
    keeper_connection._spawned = spawned


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """A server, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/keepers")
        listener.listen(64)
        command = [sys.executable, "-m", "tests.keepers", str(listener.fileno()), "-" * _ROOM]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=env)
        os.environ[WHERE] = f"{folder}/keepers"
        try:
            yield
        finally:
            del os.environ[WHERE]
            server.communicate(timeout=_ANSWER_S)


# ---- the server ------------------------------------------------------------------------------------------------------


def main() -> None:
    from dlrover_hooks.checkpoint.keeper import __main__ as keeper

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads) - 1} threads"
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        while 0 not in select.select([0, listener], [], [])[0]:
            line, _ = listener.accept()
            with line, line.makefile() as orders:
                order = json.loads(orders.readline())
                if not (child := os.fork()):
                    listener.close()
                    line.close()
                    _become(order["arguments"], order["env"])
                    os._exit(keeper.main(order["arguments"]))
                os.waitpid(child, 0)
                line.sendall(b"!")


def _become(arguments: list[str], env: dict[str, str]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.environ.clear()
    os.environ.update(env)
    words = [sys.executable, "-m", "dlrover_hooks.checkpoint.keeper", *arguments]
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, "\0".join(words).encode().ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
