"""Forks the processes of a chaos test, with everything imported already: each costs milliseconds instead of a second.

    python -m tests.chaos.zygote CONTROL_FD LOG

Reads one JSON line for each process and answers with its pid. Single-threaded, and without torch unless it is told to
load it, so that what it forks is as if it had just been started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

MODULES = ("dlrover_hooks.session", "dlrover_hooks.checkpoint.keeper", "dlrover_hooks.master.__main__")


def main() -> None:
    control, log = int(sys.argv[1]), sys.argv[2]
    for module in (*MODULES, *sys.argv[3:]):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: pidfds do
    with socket.socket(fileno=control) as line, line.makefile("r") as orders:
        for order in orders:
            given = json.loads(order)
            pid = os.fork()
            if not pid:
                _run(given, log)
            line.sendall(f"{pid}\n".encode())


def _run(given: dict[str, Any], log: str) -> None:
    """In the child: `target` is a function to be called with the rest. Of our descriptors it has those it `keeps`."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
        faulthandler.register(signal.SIGUSR2)  # where does it hang?
        keeps = given.pop("keeps", [])
        for fd in range(3, 64):
            if fd not in keeps:
                with contextlib.suppress(OSError):
                    os.close(fd)
        module, name = given.pop("target").split(":")
        code = getattr(importlib.import_module(module), name)(**given) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
