"""The master's listening socket, and ports for the process group's store."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket

from dlrover_hooks.errors import LaunchError


def listen(port: int, host: str = "127.0.0.1") -> socket.socket:
    """The master's listening socket, owned by the launcher: while the master restarts, clients wait, not fail."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"port {port} cannot be used: {error.strerror}", hint="leave --port out for a free one"
        ) from error
    listener.listen(1024)
    return listener


def free_port() -> int:
    """A port for the process group's store, below the ephemeral range so that no outgoing connection takes it."""
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise LaunchError("no free port between 20000 and 30000 for the process group's store")


class Port:
    """A free port, bound until `release` so that the kernel gives it to no other program.

    torch's store sets SO_REUSEADDR like this socket and can therefore listen on it meanwhile.
    """

    def __init__(self) -> None:
        for _ in range(100):
            self.number = free_port()
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                self._held.bind(("", self.number))
                return
            self._held.close()
        raise LaunchError("no free port between 20000 and 30000 for the process group's store")

    def release(self) -> None:
        """Idempotent."""
        self._held.close()


_HELD: list[Port] = []


def held_port() -> int:
    """A port for the process group's store of the next round, held by this process until the next call.

    A round may form minutes later; the store can listen on the port while it is held.
    """
    port = Port()
    _let_go()
    _HELD.append(port)
    return port.number


def _let_go() -> None:
    while _HELD:
        _HELD.pop().release()


atexit.register(_let_go)
os.register_at_fork(after_in_child=_let_go)  # DataLoader workers may outlive the round
