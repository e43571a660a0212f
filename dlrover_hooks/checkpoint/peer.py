"""A trainer's connection as the keeper's loop sees it: never blocks, whatever the other side does. No torch."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence

from dlrover_hooks.checkpoint.wire import Frames, Hello, Wire, frame
from dlrover_hooks.protocol import Generation


class Peer:
    """One connection. `hello` is None until the trainer has said who it is; `seat` None once another took its seat."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.frames = Frames()
        self.hello: Hello | None = None
        self.replaced = False
        self.goodbye = False
        self.finished = False
        self.persisting: set[Generation] = set()
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()

    def send(self, message: Wire, fds: Sequence[int] = ()) -> None:
        """Queue `message`; `flush` sends it. `fds` stay the caller's and must live until then."""
        self._outbox.append((memoryview(frame(message)), fds))

    def flush(self) -> bool:
        """Send what the socket takes; True if something is left. Raises OSError when the connection is gone."""
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                sent = socket.send_fds(self.socket, [data], list(fds)) if fds else self.socket.send(data)
            except BlockingIOError:
                return True
            if sent < len(data):
                self._outbox[0] = (data[sent:], ())
            else:
                self._outbox.popleft()
        return False

    def close(self) -> None:
        self.frames.close()
        self.socket.close()
