"""The TCP connections of this process's collectives: found, cut when a peer hangs, given up in forked children.

torch 2.13 has no call that ends a pending gloo collective: all wait for the group's timeout. `shutdown(2)` of its
connections does, at once (facts: elastic, 4). Each gloo group watches its connections by an epoll instance of its own,
made with the group; so those that appear in /proc/self/fd while a group is made tell exactly which sockets are gloo's.
The store's connections are told by its port. Linux only; relies on gloo connecting at once (TORCH_GLOO_LAZY_INIT off).
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
    """Of one life of the training function. `opening` on the training thread, `cut` on any."""

    def __init__(self) -> None:
        self._pollers = set[int]()
        """The epoll instances of groups that are made."""
        self._before: set[int] | None = None
        """Those that were there when the group began that is being made."""
        self._made = 0
        """So many connections the groups had when they were made."""
        self._store_port = 0
        self._lock = threading.Lock()
        _ALL.add(self)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """A process group is made inside."""
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
        """The groups' store listens at `port`, here or on another host."""
        self._store_port = port

    def cut(self) -> int:
        """End every connection, so that each pending collective fails, and each later one. How many there were."""
        with self._lock:
            return sum(map(_shut, self._found()))

    def intact(self) -> bool:
        """All connections to peers are open: what a collective raised meanwhile is not the end of a peer.

        Gloo closes a connection at its first error. False without connections, which says nothing.
        """
        with self._lock:
            found = self._found()
            return 0 < self._made <= len(self._peers()) and not any(map(_at_end, found))

    def let_go_in_child(self) -> None:
        """After a fork, in the child: while it held the sockets, peers would not see its parent die. No lock."""
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
    """Open descriptors whose link has that word in it."""
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
    """What `poller` watches, if it may be gloo's: every event loop of Python's also watches a local socket."""
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
    """Both ports of a TCP connection; empty for any other socket, listening ones among them."""
    try:
        with _borrowed(descriptor) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return set()
            return {one.getpeername()[1], one.getsockname()[1]}
    except OSError:
        return set()


def _at_end(descriptor: int) -> bool:
    """The peer has closed it."""
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
    """A duplicate: to close it leaves the connection as it is. Raises OSError for what is no socket."""
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
