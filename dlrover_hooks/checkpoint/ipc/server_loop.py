"""The keeper's connections: one thread that never blocks on any of them. No torch."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from dlrover_hooks.checkpoint.ipc import keeper_messages, unix_socket
from dlrover_hooks.checkpoint.ipc.server_connection import Peer
from dlrover_hooks.errors import KeeperAway

_log = logging.getLogger(__name__)


class ServerLoop:
    """All methods but `post` are called on the thread that calls `turn`.

    `handle(peer, message, fd)` handles a message; if it raises KeeperAway, the connection is closed. `lost(peer)` is
    called after a connection ended. Any other exception of these or of posted calls is logged: a failure for one
    trainer must not cost the others their memory.
    """

    def __init__(
        self, listener: socket.socket, handle: Callable[[Peer, Any, int], None], lost: Callable[[Peer], None]
    ) -> None:
        self.peers: set[Peer] = set()
        self._listener: socket.socket | None = None
        self._handle, self._lost = handle, lost
        self._inbox: deque[Callable[[], None]] = deque()
        self._bell, self._ring = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Closed for a moment when no other descriptor is left."""
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self.open_door(listener)
        self.watch(self._bell, self._answer_bell)

    def turn(self, timeout_s: float | None) -> None:
        """Serve the connections that become ready within `timeout_s`."""
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, Peer):
                self._serve(key.data, events)
            else:
                key.data()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop. Any thread, or a signal handler."""
        self._inbox.append(call)
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"!")

    def watch(self, source: socket.socket | int, then: Callable[[], None]) -> None:
        """Call `then()` whenever `source` can be read."""
        self._selector.register(source, selectors.EVENT_READ, then)

    def unwatch(self, source: socket.socket | int) -> None:
        self._selector.unregister(source)

    def open_door(self, listener: socket.socket) -> None:
        """Replace the listening socket; the previous one is closed."""
        self.close_door()
        self._listener = listener
        listener.setblocking(False)
        self.watch(listener, self._accept)

    def close_door(self) -> None:
        """Accept no new connections. Idempotent."""
        if self._listener is not None:
            self.unwatch(self._listener)
            self._listener.close()
            self._listener = None

    def send(self, peer: Peer, message: keeper_messages.KeeperMessage, *fds: int) -> None:
        """Send to `peer`, if it is still connected."""
        if peer in self.peers:
            peer.send(message, fds)
            try:
                self._flush(peer)
            except OSError:
                self._lose(peer)

    def tell(self, seat: int, notice: keeper_messages.KeeperMessage) -> None:
        """Send to the worker with local rank `seat`."""
        for peer in list(self.peers):
            if peer.hello is not None and peer.hello.seat == seat and not peer.replaced:
                self.send(peer, notice)

    def sweep(self, asking: Peer) -> None:
        """Serve all other connections first: a restarted trainer must find what its dead predecessor published."""
        for other in list(self.peers):
            if other is not asking:
                self._serve(other, selectors.EVENT_READ)

    def _answer_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call()
            except Exception:
                _log.exception("something was not done")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        if not unix_socket.welcome(unix_socket.peer_uid(connection)):
            _log.warning("a process of user %d was refused", unix_socket.peer_uid(connection))
            connection.close()
            return
        peer = Peer(connection)
        self.peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _turn_away(self) -> None:
        """No descriptor is left for a new connection: accept it with the spare one and close it.

        If it stayed in the listener's queue, each turn of this loop would return at once.
        """
        assert self._listener is not None
        _log.error("a process cannot connect: this keeper has no file descriptor left (ulimit -n)")
        os.close(self._spare)
        try:
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                alive = peer.frames.receive(peer.socket)
                for message, fd in peer.frames.messages():
                    self._handle(peer, message, fd)
                if not alive:
                    self._lose(peer)
                    return
            self._flush(peer)
        except BlockingIOError:
            return
        except (OSError, KeeperAway) as error:
            _log.info("a trainer's connection ended: %s", error)
            self._lose(peer)
        except Exception:
            _log.exception("a request of process %d failed: its connection is closed", peer.pid)
            self._lose(peer)

    def _flush(self, peer: Peer) -> None:
        if peer in self.peers:
            wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.flush() else 0)
            self._selector.modify(peer.socket, wants, peer)

    def _lose(self, peer: Peer) -> None:
        if peer not in self.peers:
            return
        self.peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.close()
        try:
            self._lost(peer)
        except Exception:
            _log.exception("cleaning up after process %d failed", peer.pid)
