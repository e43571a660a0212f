"""Simulates a bad network to the master: a TCP proxy that can cut, delay and stall traffic.

with Proxy(master_url) as proxy:
    ...  # workers get proxy.url as their master
    proxy.cut(2.0)
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlsplit

from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.background_thread import BackgroundThread

_CONNECT_S = 5.0


class Proxy:
    """Forwards TCP to the master at `url` (http). Any thread; `close` ends all threads and connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends = set[socket.socket]()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = False
        self._cut_until = self._clogged_until = self._delay_s = 0.0
        self._threads: list[BackgroundThread] = []
        self._error: HooksError | None = None
        self._start(self._accept)

    def cut(self, seconds: float = 0.0) -> None:
        """End all connections, and reject new ones for `seconds`."""
        self._cut_until = time.monotonic() + seconds
        self._end_all()

    def clog(self, seconds: float) -> None:
        """Keep connections open, but forward nothing for `seconds`."""
        self._clogged_until = time.monotonic() + seconds

    def delay(self, seconds: float) -> None:
        """Delay all traffic by `seconds`, each way, from now on."""
        self._delay_s = seconds

    def close(self) -> None:
        """Stop the proxy; raise the first unexpected error of its threads. Safe to call twice."""
        self._closed = True
        self._changed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()
        for thread in self._threads:
            thread.stop(_CONNECT_S)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        run = functools.partial(target, *args)
        thread = BackgroundThread("dlrover-hooks-proxy", run, where=f"the proxy {self.url}", failed=self._met)
        self._threads = [one for one in self._threads if one.alive] + [thread]
        thread.start()

    def _met(self, error: HooksError) -> None:
        self._error = self._error or error

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):  # closed, or the master is down: the client's connection ends
                self._join_up(self._listener.accept()[0])

    def _join_up(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._upstream, _CONNECT_S)
        except OSError:
            near.close()
            raise
        far.settimeout(None)
        with self._lock:
            self._ends |= {near, far}
        if time.monotonic() < self._cut_until or self._closed:
            self._end_all()
        self._start(self._forward, near, far)
        self._start(self._forward, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._hold_back()
                sink.sendall(data)
        for end in (source, sink):
            self._end(end)

    def _hold_back(self) -> None:
        due = time.monotonic() + self._delay_s
        while (rest := max(due, self._clogged_until) - time.monotonic()) > 0 and not self._closed:
            self._changed.wait(rest)

    def _end_all(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, set()
        for end in ends:
            self._end(end)

    def _end(self, end: socket.socket) -> None:
        """Close a socket, with shutdown first: another thread may be blocked reading it."""
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
        with self._lock:
            self._ends.discard(end)
