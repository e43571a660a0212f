"""The liveness connection: one open request per worker. When it closes, the master detects the worker's end.

A forked child (a DataLoader worker) inherits the socket. While the child holds it, the kernel does not report the
parent's death. The child therefore closes its copy at once, without taking any lock.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from dlrover_hooks.client.master_addresses import MasterAddresses
from dlrover_hooks.config import Tls
from dlrover_hooks.config.tls_files import context
from dlrover_hooks.errors import HooksError, MasterError, named
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import LEADER_HEADER, Notice, Problem, Routes, Watch

_CONNECT_S = 5.0
_AGAIN = (500, 502, 503, 504)
_AGAIN_S = 1.0
"""Pause after an unexpected error."""


class MasterAddress(msgspec.Struct, frozen=True):
    """URLs, headers and TLS files of the masters."""

    addresses: MasterAddresses
    headers: dict[str, str]
    tls: Tls | None = None
    """For https; `ca` is filled in with a file or folder."""


class LivenessConnection:
    """One connection whose descriptor is recorded as soon as it exists, so that a fork at any moment can close it."""

    def __init__(self, wire: MasterAddress) -> None:
        self.url = wire.addresses.current
        parts = urlsplit(self.url)
        self._wire, self._netloc, self._host = wire, parts.netloc, parts.hostname or ""
        self._context = context(wire.tls) if wire.tls is not None else None
        self._address = (self._host, parts.port or (443 if self._context else 80))
        self._sock: socket.socket | None = None
        self._http: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes, str]:
        """Status and body of the answer, and the leader if it names one; waits without a time limit.

        Raises OSError or HTTPException.
        """
        self.connect()
        assert self._http is not None
        self._http.request(method, path, body, self._wire.headers)
        response = self._http.getresponse()
        return response.status, response.read(), response.getheader(LEADER_HEADER, "")

    def connect(self) -> None:
        """Connects unless connected already. Raises OSError."""
        if self._http is None:
            self._http = self._connected()

    def _connected(self) -> http.client.HTTPConnection:
        self._sock = self._dialled()
        if self._context is not None:
            with _FORKING:  # wrapping moves the descriptor to a new object
                self._sock = self._context.wrap_socket(
                    self._sock, server_hostname=self._host, do_handshake_on_connect=False
                )
            self._sock.do_handshake()
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            self._sock.setsockopt(socket.IPPROTO_TCP, option, value)
        connection = http.client.HTTPConnection(self._netloc)
        connection.sock = self._sock
        connection.auto_open = 0  # one that it opens by itself has neither TLS nor a recorded descriptor
        return connection

    def _dialled(self) -> socket.socket:
        """A socket connected to the first address of the host that accepts. Raises the first OSError."""
        refused: OSError | None = None
        for family, kind, _, _, address in socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM):
            with _FORKING:
                self._sock = sock = socket.socket(family, kind)
            sock.settimeout(_CONNECT_S)
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                refused = refused or error
            else:
                return sock
        raise refused or OSError(f"{self._host} has no address")

    def hang_up(self) -> None:
        """Shut the socket down, which wakes a thread blocked in `ask`. Any thread."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only on the thread that calls `ask`. The master is told even if a child forked just now has a copy."""
        self.hang_up()
        if self._http is not None:
            self._http.close()
        if self._sock is not None:
            self._sock.close()

    def let_go_in_child(self) -> None:
        """After a fork, in the child: close the inherited descriptor without taking a lock or sending anything."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                os.close(self._sock.detach())


_KEEPALIVE = tuple(
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
)


class Watcher:
    """Keeps the liveness connection open in the daemon thread `dlrover-hooks-watch`. Its callbacks must be short.

    `on_failure` is called with an unexpected error, also one of a callback; the watch then goes on.
    """

    def __init__(
        self,
        wire: MasterAddress,
        job: str,
        incarnation: str,
        on_notice: Callable[[Notice], None],
        on_error: Callable[[MasterError], None] | None = None,
        on_failure: Callable[[HooksError], object] | None = None,
    ) -> None:
        self.error: MasterError | None = None
        self.away_since: float | None = None
        """Since when the master has been unreachable (monotonic seconds); None: it is reachable."""
        self._wire, self._request = wire, Watch(job=job, incarnation=incarnation, parting=0)
        self._on_notice, self._on_error, self._on_failure = on_notice, on_error, on_failure
        self._line: LivenessConnection | None = None
        _WATCHERS.add(self)
        self._thread = BackgroundThread(
            "dlrover-hooks-watch",
            self._run,
            where=f"job {job}, the liveness connection",
            on_error="warn",
            again_s=_AGAIN_S,
            failed=self._failed,
            wake=self._hang_up,
        )
        self._thread.start()

    def close(self) -> None:
        """End the watch. Idempotent; any thread."""
        self._thread.stop(_CONNECT_S)

    def moved(self) -> None:
        """Another master is asked now: leave the connection to this one. Any thread."""
        line = self._line
        if line is not None and line.url != self._wire.addresses.current:
            line.hang_up()

    def _hang_up(self) -> None:
        line = self._line
        if line is not None:
            line.hang_up()

    def _failed(self, error: HooksError) -> None:
        self._drop()
        if self._on_failure is not None:
            self._on_failure(error)

    def _run(self) -> None:
        pause_s = 0.02
        while not self._thread.stopping.is_set():
            try:
                notice = self._ask()
                pause_s = 0.02
            except (OSError, http.client.HTTPException, msgspec.DecodeError):
                notice, self.away_since = None, self.away_since or time.monotonic()
            except MasterError as refusal:
                self._refused(refusal)
                return
            if notice is not None:
                self._request = self._request.told(notice)
                self._on_notice(notice)
                if notice.finished:
                    break
            else:
                self._thread.stopping.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(1.0, 2 * pause_s)
        self._drop()

    def _refused(self, refusal: MasterError) -> None:
        self._drop()
        self.error = refusal
        if self._on_error is not None and not self._thread.stopping.is_set():
            self._on_error(refusal)

    def _ask(self) -> Notice | None:
        """Sends one request; the master answers when there is a notice. None: try again later."""
        row = Routes.by_request[Watch]
        try:
            if self._line is None:
                self._line = LivenessConnection(self._wire)
            self._line.connect()
            if self._thread.stopping.is_set():  # `close` ran before there was a connection to shut down
                return None
            self.away_since = None
            status, body, leader = self._line.ask(row.method, row.path, msgspec.json.encode(self._request))
        except BaseException:
            self._drop(lost=True)
            raise
        if status < 300:
            return msgspec.json.decode(body, type=Notice)
        if status in _AGAIN:
            self._drop(lost=True, leader=leader)
            return None
        problem = msgspec.json.decode(body, type=Problem)
        error = named(problem.type)(problem.detail, hint=problem.hint)
        raise error if isinstance(error, MasterError) else MasterError(problem.detail, hint=problem.hint)

    def _drop(self, *, lost: bool = False, leader: str = "") -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
            if lost:
                self._wire.addresses.failed(line.url, leader)

    def let_go_in_child(self) -> None:
        """After a fork, in the child: drop the parent's connection."""
        line, self._line = self._line, None
        if line is not None:
            line.let_go_in_child()


_WATCHERS: weakref.WeakSet[Watcher] = weakref.WeakSet()


_FORKING = threading.Lock()
"""Held while a descriptor is created but not recorded yet, and acquired before every fork."""


def _let_go_in_child() -> None:
    _FORKING.release()
    for watcher in list(_WATCHERS):
        watcher.let_go_in_child()


os.register_at_fork(before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_let_go_in_child)
