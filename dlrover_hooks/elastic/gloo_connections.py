"""Finds the TCP connections of this process's collectives, shuts them down when a peer hangs, and closes them in forks.

torch 2.13 has no call that aborts a pending gloo collective: it waits for the group's timeout. `shutdown(2)` on its
connections ends it at once. Each gloo group watches its connections with its own epoll instance, created with the
group. So the epoll instances that appear in /proc/self/fd while a group is created identify gloo's sockets. The store's
connections are identified by their port. Linux only. Requires that gloo connects eagerly (TORCH_GLOO_LAZY_INIT off).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import weakref
from collections.abc import Iterator

_FDS = "/proc/self/fd"
_TARGET = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)


class Connections:
    """The connections of one call of the training function.

    `opening` runs on the training thread, `cut` on any thread.
    """

    def __init__(self) -> None:
        self._pollers = set[int]()
        """The epoll instances of the groups created so far."""
        self._before: set[int] | None = None
        """The epoll instances that existed before the group now being created; None outside `opening`."""
        self._made = 0
        """Number of peer connections when the last group was created."""
        self._store_port = 0
        self._lock = threading.Lock()
        _ALL.add(self)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Context in which a process group is created."""
        with self._lock:
            self._before = _pollers()
        try:
            yield
        finally:
            with self._lock:
                self._pollers |= self._new()
                self._before = None
                self._made = len(self._peers())

    def store(self, port: int) -> None:
        """Record that the groups' store listens at `port`, on this or another host."""
        self._store_port = port

    def cut(self) -> int:
        """Shut down every connection, so that pending and later collectives fail. Returns how many were shut down."""
        with self._lock:
            return sum(map(_shut, self._found()))

    def intact(self) -> bool:
        """True if all connections to peers are open: an error raised meanwhile was not caused by the end of a peer.

        Gloo closes a connection at its first error. False if there are no connections, because then nothing can be
        concluded.
        """
        with self._lock:
            found = self._found()
            return 0 < self._made <= len(self._peers()) and not any(map(_at_end, found))

    def let_go_in_child(self) -> None:
        """Close the sockets in a forked child: they would hide the death of its parent from peers. Takes no lock."""
        for descriptor in self._found():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _peers(self) -> set[int]:
        found = {one for poller in self._pollers | self._new() for one in _targets(poller)}
        return {one for one in found if _ports(one)}

    def _found(self) -> list[int]:
        found = self._peers()
        return [one for one in _sockets() if (ports := _ports(one)) and (one in found or self._store_port in ports)]

    def _new(self) -> set[int]:
        return _pollers() - self._before if self._before is not None else set()


def _named(word: str) -> set[int]:
    """Open descriptors whose link target contains `word`."""
    found = set[int]()
    for descriptor in map(int, os.listdir(_FDS)):
        with contextlib.suppress(OSError):  # closed meanwhile
            if word in os.readlink(f"{_FDS}/{descriptor}"):
                found.add(descriptor)
    return found


def _pollers() -> set[int]:
    return _named("[eventpoll]")


def _sockets() -> list[int]:
    return sorted(_named("socket:["))


def _targets(poller: int) -> set[int]:
    """The descriptors that `poller` watches; empty if it watches a local socket, as Python's event loops do."""
    try:
        with open(f"/proc/self/fdinfo/{poller}", encoding="ascii") as file:
            found = set(map(int, _TARGET.findall(file.read())))
        return set() if any(_family(one) == socket.AF_UNIX for one in found) else found
    except OSError:
        return set()


def _family(descriptor: int) -> int | None:
    try:
        with _borrowed(descriptor) as one:
            return one.family
    except OSError:  # a pipe, or closed meanwhile
        return None


def _ports(descriptor: int) -> set[int]:
    """Both ports of a TCP connection; empty for any other socket, including listening ones."""
    try:
        with _borrowed(descriptor) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return set()
            return {one.getpeername()[1], one.getsockname()[1]}
    except OSError:
        return set()


def _at_end(descriptor: int) -> bool:
    """True if the peer has closed the connection."""
    try:
        with _borrowed(descriptor) as one:
            return not one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _shut(descriptor: int) -> int:
    try:
        with _borrowed(descriptor) as one:
            one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0
    return 1


def _borrowed(descriptor: int) -> socket.socket:
    """A duplicate: closing it leaves the connection open. Raises OSError if the descriptor is not a socket."""
    twin = os.dup(descriptor)
    try:
        return socket.socket(fileno=twin)
    except OSError:
        os.close(twin)
        raise


_ALL: weakref.WeakSet[Connections] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for connections in list(_ALL):
        connections.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
