"""Calls between processes of one machine over a Unix socket, in a folder that only this user can access.

A frame has a head and bytes from `call_messages`. The head is the length of these bytes, the number of the call, and
in a request how many seconds its caller still waits. A connection carries one call at a time. The answer has the number
of its request, so that an answer to another call is noticed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
from typing import Any

from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.host.socket_paths import short_path
from dlrover_hooks.job.call_codec import MOST_BYTES
from dlrover_hooks.job.call_messages import Answer, answered, request, result_of

_HEAD = struct.Struct("!IQd")
_CONNECT_S, _AGAIN_S, _LEAST_S = 5.0, 0.1, 1e-3
_JOINED_BYTES = 1 << 16
"""Up to this size a head and its data are sent together. Copying more takes longer than sending twice."""
_FIRST_BYTES = 1 << 12
_MOST_IDLE = 4


class CallServer:
    """Serves `answer` at `path`, each connection in a thread of its own, until `close`.

    If `answer` raises, the caller gets `CallFailed`, see `call_messages.answered`.
    """

    def __init__(self, path: str, answer: Answer) -> None:
        self.path = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

        class CallConnection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    while (frame := _received(self.request)) is not None:
                        number, within_s, data = frame
                        _send(self.request, number, 0.0, answered(answer, data, within_s))

        with short_path(path) as short:
            self._server = _Server(short, CallConnection)
        self._thread = BackgroundThread(
            "dlrover-hooks-calls", self._server.serve_forever, where=path, on_error="warn", again_s=_AGAIN_S
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and remove the socket."""
        self._thread.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128


class CallClient:
    """Calls the server at `path`. Any thread, also in a forked child, which opens its own connections.

    A call takes an idle connection or opens one. At most 4 idle connections are kept. If a call fails or is
    interrupted, its connection is closed, because its answer may still arrive.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle = list[_Connection]()
        """Only its atomic operations are used: a lock could be held for ever in a forked child."""
        self._closed = False

    def call(self, function: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """Call a function and return its result. Raises as `exchange` does, and:

        CallFailed: the function raised.
        UsageError: an argument cannot be sent.
        """
        return result_of(self.exchange(request(function, list(arguments)), timeout_s))

    def exchange(self, data: bytes, timeout_s: float) -> bytes | bytearray:
        """Send a request and return its answer.

        Raises:
            OSError: no connection could be made, or it was lost before the answer. The function may have run.
            TimeoutError: there was no answer within `timeout_s` seconds. The function may have run.
        """
        connection = self._taken() or _Connection(self.path, min(timeout_s, _CONNECT_S))
        try:
            answer = connection.exchange(data, timeout_s)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                self._close_idle()
            raise
        self._idle.append(connection)
        if self._closed:
            self._close_idle()
        elif len(self._idle) > _MOST_IDLE:
            self._close_one()
        return answer

    def close(self) -> None:
        """Close the idle connections, and keep none from now on."""
        self._closed = True
        self._close_idle()

    def _taken(self) -> _Connection | None:
        """An idle connection of this process. Those of a parent process are closed here, which the parent does not
        notice."""
        while (connection := self._popped()) is not None and not connection.here:
            connection.close()
        return connection

    def _popped(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _close_one(self) -> bool:
        connection = self._popped()
        if connection is not None:
            connection.close()
        return connection is not None

    def _close_idle(self) -> None:
        while self._close_one():
            pass


class CallClients:
    """A `CallClient` for each path. One that has failed is dropped: its process may have ended. Any thread."""

    def __init__(self) -> None:
        self._clients = dict[str, CallClient]()

    def exchange(self, path: str, data: bytes, timeout_s: float) -> bytes | bytearray:
        """See `CallClient.exchange`."""
        client = self._clients.get(path) or self._clients.setdefault(path, CallClient(path))
        try:
            return client.exchange(data, timeout_s)
        except OSError:
            client.close()
            if (dropped := self._clients.pop(path, None)) is not None:
                dropped.close()
            raise


class _Connection:
    """A connection. `here`: it was opened by this process. The constructor raises OSError."""

    def __init__(self, path: str, within_s: float) -> None:
        self.here, self._count = ForkGuard(), 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(max(within_s, _LEAST_S))
            with short_path(path) as short:
                self._socket.connect(short)
        except BaseException:
            self._socket.close()
            raise

    def exchange(self, data: bytes, timeout_s: float) -> bytes | bytearray:
        """See `CallClient.exchange`."""
        self._count = (self._count + 1) % (1 << 32)
        number = os.getpid() << 32 | self._count  # another process could only continue the counter
        self._socket.settimeout(max(timeout_s, _LEAST_S))
        _send(self._socket, number, timeout_s, data)
        frame = _received(self._socket)
        if frame is None:
            raise ConnectionResetError("the process ended before it answered")
        if frame[0] != number:
            raise ConnectionError("the answer to another call arrived")
        return frame[2]

    def close(self) -> None:
        """Close it, in this process only."""
        self._socket.close()


def _send(connection: socket.socket, number: int, seconds: float, data: bytes) -> None:
    head = _HEAD.pack(len(data), number, seconds)
    if len(data) > _JOINED_BYTES:
        connection.sendall(head)
        connection.sendall(data)
    else:
        connection.sendall(head + data)


def _received(connection: socket.socket) -> tuple[int, float, bytearray] | None:
    """Number, seconds and data of the next frame; None at the end of the connection. Raises OSError, also for a frame
    above 2 GiB, and for bytes that follow it, because no other call may be sent before this one is answered."""
    first = connection.recv(_FIRST_BYTES)
    while 0 < len(first) < _HEAD.size and (more := connection.recv(_FIRST_BYTES)):
        first += more
    if len(first) < _HEAD.size:
        return None
    length, number, seconds = _HEAD.unpack_from(first)
    got = len(first) - _HEAD.size
    if got > length or length > MOST_BYTES:
        raise OSError(f"this is no frame: {length} bytes, of which {got} arrived at once")
    data = bytearray(length)
    data[:got] = first[_HEAD.size :]
    view = memoryview(data)
    while got < length:
        count = connection.recv_into(view[got:])
        if not count:
            return None
        got += count
    return number, seconds, data
