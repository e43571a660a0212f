"""Calls between processes of one machine over a Unix socket, in a folder that only this user can access.

A frame is a length of four bytes (big-endian) and that many bytes from `call_codec`. A connection carries one call at
a time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks.errors import CallFailed, HooksError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.socket_paths import short_path
from dlrover_hooks.job.call_codec import decode, encode

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 31
_CONNECT_S, _AGAIN_S = 5.0, 0.1


class CallServer:
    """Serves `answer(function, arguments)` at `path`, each connection in a thread of its own, until `close`.

    If `answer` raises, the caller gets `CallFailed`, with the traceback unless it is a `HooksError`.
    """

    def __init__(self, path: str, answer: Callable[[str, list[Any]], Any]) -> None:
        self.path = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

        class CallConnection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    while (frame := _received(self.request)) is not None:
                        self.request.sendall(_framed(_answered(answer, frame)))

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


def _answered(answer: Callable[[str, list[Any]], Any], frame: bytes) -> bytes:
    try:
        function, arguments = decode(frame)
        return encode([True, answer(function, arguments)])
    except HooksError as error:
        return encode([False, f"{type(error).__name__}: {error}"])
    except Exception as error:
        return encode([False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"])


class CallClient:
    """Calls the server at `path`. Any thread; each thread has its own connection."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._local = threading.local()

    def call(self, function: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """Call a function and return its result.

        Raises:
            OSError: no connection could be made, or it was lost before the answer. The function may have run.
            TimeoutError: there was no answer within `timeout_s` seconds. The function may have run.
            CallFailed: the function raised.
            UsageError: an argument cannot be sent.
        """
        data = encode([function, list(arguments)])
        try:
            answer = self._exchanged(data, timeout_s)
        except (OSError, msgspec.DecodeError):
            self.close()
            raise
        if not answer[0]:
            raise CallFailed(answer[1])
        return answer[1]

    def _exchanged(self, data: bytes, timeout_s: float) -> list[Any]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_CONNECT_S)
            self._local.connection = connection
            with short_path(self.path) as short:
                connection.connect(short)
        connection.settimeout(timeout_s)
        connection.sendall(_framed(data))
        frame = _received(connection)
        if frame is None:
            raise ConnectionResetError(f"{self.path}: the process ended")
        return decode(frame)

    def close(self) -> None:
        """Close the connection of this thread. The next call opens a new one."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _received(connection: socket.socket) -> bytes | None:
    """The next frame; None at the end of the connection. Raises OSError, also for a frame above 2 GiB."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_BYTES:
        raise OSError(f"a frame of {length} bytes is too large")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        more = connection.recv_into(view[got:])
        if not more:
            return None
        got += more
    return bytes(data)
