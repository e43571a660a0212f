"""Where other nodes' keepers come in: a TCP listener, a thread for each caller, nobody heard who proved nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from dlrover_hooks.checkpoint.channel import Channel, admit
from dlrover_hooks.errors import HooksError
from dlrover_hooks.protocol import Secret

CALLERS = 64
"""At once; whoever comes then is turned away, and tries again."""
_log = logging.getLogger(__name__)


class Door:
    """Listens on `host`:`port` (0: any free port) until `close`. `serve(channel, node)` is called on a caller's thread.

    `secret()` and `node()`: what this keeper proves, now.

    Raises:
        OSError: that address cannot be had.
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
        threading.Thread(target=self._accept, name="keeper-door", daemon=True).start()

    def close(self) -> None:
        """End the listener and all connections, and so their threads. Idempotent."""
        for one in (self._listener, *tuple(self._open)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            self._open.add(connection)
            threading.Thread(
                target=self._answer, args=(connection, str(address[0])), name="keeper-caller", daemon=True
            ).start()

    def _answer(self, connection: socket.socket, address: str) -> None:
        try:
            channel, node = admit(connection, address, self._secret(), self._node())
            self._serve(channel, node)
        except (HooksError, OSError) as error:
            _log.warning("%s", error.message if isinstance(error, HooksError) else error)
        finally:
            self._open.discard(connection)
            connection.close()
            self._free.release()
