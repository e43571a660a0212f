"""The TCP listener for other nodes' keepers: one thread per caller, and no request is read before authentication."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable

from dlrover_hooks.checkpoint.replication.peer_channel import Channel, admit
from dlrover_hooks.errors import HooksError, KeeperAway
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import Secret

CALLERS = 64
"""Authenticated callers at once. More are refused, and try again."""
STRANGERS = 64
"""Connections that are not authenticated yet, which takes milliseconds. One more closes the oldest of them."""
PAUSE_S = 0.5
"""Pause after `accept` failed, for lack of file descriptors for example."""
_log = logging.getLogger(__name__)


class ReplicationListener:
    """Listens on `host`:`port` (0: any free port) until `close`. `serve(channel, node)` is called on a caller's thread.

    `secret()` and `node()`: the current secret and node name, for authentication.

    Raises:
        OSError: the address is not available.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Callable[[], Secret],
        node: Callable[[], str],
        serve: Callable[[Channel, str], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._secret, self._node, self._serve = secret, node, serve
        self._free = threading.Semaphore(CALLERS)
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        """In order of arrival."""
        self._lock = threading.Lock()
        self._accepting = BackgroundThread(
            "keeper-listener",
            self._accept,
            where=f"the port {self.port} for other nodes",
            on_error="warn",
            again_s=PAUSE_S,
        )
        self._accepting.start()

    def close(self) -> None:
        """Close the listener and all connections, which ends their threads. Idempotent."""
        self._accepting.stopping.set()
        for one in (self._listener, *tuple(self._open)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._accepting.stop()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._accepting.stopping.is_set():
                    return
                _log.warning("port %d takes no connection for now: %s", self.port, error)
                self._accepting.stopping.wait(PAUSE_S)
                continue
            self._let_in(connection)
            self._open.add(connection)
            answer = functools.partial(self._answer, connection, str(address[0]))
            caller = BackgroundThread("keeper-caller", answer, where=f"the caller {address[0]}", on_error="warn")
            try:
                caller.start()
            except RuntimeError as error:  # the limit of threads is reached
                _log.warning("a connection from %s was refused: %s", address[0], error)
                self._end(connection)

    def _let_in(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._strangers) >= STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread, too
            self._strangers[connection] = None

    def _answer(self, connection: socket.socket, address: str) -> None:
        try:
            known = functools.partial(self._known, connection)
            channel, node = admit(connection, address, self._secret(), self._node(), known)
            self._take(channel, node)
        except (HooksError, OSError) as error:
            _log.warning("%s", error.message if isinstance(error, HooksError) else error)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._known(connection)
        self._open.discard(connection)
        connection.close()

    def _known(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _take(self, channel: Channel, node: str) -> None:
        if not self._free.acquire(blocking=False):
            raise KeeperAway(f"{channel.who} was turned away: {CALLERS} others are here")
        try:
            self._serve(channel, node)
        finally:
            self._free.release()
