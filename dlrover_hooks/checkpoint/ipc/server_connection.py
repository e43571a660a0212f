"""A trainer's connection on the keeper's side: never blocks, whatever the trainer does. No torch."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence

from dlrover_hooks.checkpoint.ipc.keeper_messages import Frames, Hello, KeeperMessage, frame
from dlrover_hooks.checkpoint.ipc.unix_socket import peer_pid, send


class Peer:
    """One connection. `hello`: the registration, None before. `replaced`: another process registered for that worker.

    `asked`: it sent Hello, or Inventory with a master. `finished`: it sent Goodbye, and needs no successor.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.frames = Frames()
        self.pid = peer_pid(connection)
        self.hello: Hello | None = None
        self.asked = self.replaced = self.finished = False
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()

    def master(self, named: str) -> str:
        """The master URL `named`; this process itself if that is empty."""
        return named or f"process {self.pid}"

    def saves_for(self, other_than: str) -> bool:
        """It is registered, by another master than `other_than`."""
        return self.hello is not None and not self.replaced and self.master(self.hello.master) != other_than

    def send(self, message: KeeperMessage, fds: Sequence[int] = ()) -> None:
        """Queue `message`; `flush` sends it. The caller keeps `fds` open until then."""
        self._outbox.append((memoryview(frame(message)), fds))

    def flush(self) -> bool:
        """Send what the socket accepts; True if something is left. Raises OSError if the connection is gone."""
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                sent = send(self.socket, data, fds)
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
