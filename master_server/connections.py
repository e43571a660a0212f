"""Connections to the master, and limits on what a peer may send and hold before it has sent the token.

uvicorn limits neither the size nor the duration of request headers, and its parser takes quadratic time to collect a
header that does not end. It also keeps each connection's last request, a queue and a timer, which is half of the memory
of ten thousand idle connections. All methods are called in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

import msgspec
from httptools import HttpRequestParser
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dlrover_hooks.protocol import Problem

log = logging.getLogger("dlrover_hooks.master")


class Limits(msgspec.Struct, frozen=True):
    """Limits on the resources that peers can use. A stranger is a connection that has not sent the token."""

    head_bytes: int = 64 * 2**10
    """Most bytes received without completing a header block or adding to a body: headers, URL, chunk extensions."""
    head_s: float = 20.0
    """From the first byte of a request to the end of its headers."""
    stranger_s: float = 30.0
    strangers: int = 2048
    connections: int = 1 << 20
    """Most connections of all peers. The first request on another one is refused, so that the master keeps the
    descriptors that its journal and storage need."""


class UnauthenticatedConnections:
    """The connections that have not sent the token, oldest first, and the number of all. A new connection above a limit
    aborts the oldest without the token: clients that have the token send it at once.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: dict[Connection, asyncio.TimerHandle] = {}
        self._count = 0
        """Of all connections, with and without the token."""
        self._addresses: dict[tuple[str, int | None] | None, tuple[str, int | None] | None] = {}
        """Of this machine, at which peers have connected: thousands of connections share one object."""

    def same_address(self, server: tuple[str, int | None] | None) -> tuple[str, int | None] | None:
        """An object equal to `server`, the same one for each connection."""
        return self._addresses.setdefault(server, server)

    def add(self, connection: Connection) -> bool:
        """Register an accepted connection. False: there are too many, and its first request is to be refused."""
        self._count += 1
        full = self._count > self.limits.connections
        while len(self._open) >= (1 if full else self.limits.strangers):
            next(iter(self._open)).abort("there are too many connections without the token")
        late = f"it has not shown the token within {self.limits.stranger_s:g} s"
        self._open[connection] = connection.loop.call_later(self.limits.stranger_s, connection.abort, late)
        return not full

    def lost(self, connection: Connection) -> None:
        """A registered connection has ended."""
        self._count -= 1
        self.discard(connection)

    def discard(self, connection: Connection) -> None:
        """Remove a connection that has sent the token or is being ended. Idempotent."""
        if (timer := self._open.pop(connection, None)) is not None:
            timer.cancel()


class _Pipeline(list[Any]):
    """Requests that wait for the response to the one before; an empty deque would take 700 bytes."""

    def appendleft(self, one: Any) -> None:
        """See collections.deque."""
        self.insert(0, one)


_BODY_IS_READ = asyncio.Event()
"""Replaces the event of each request whose body was read: no task waits for it any more, and one takes 800 bytes."""


class _FlowControl(FlowControl):
    """Makes its event when the peer reads too slowly: uvicorn waits for it, and sets it, only then."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        if not self.write_paused:
            self._is_writable_event = asyncio.Event()
        super().pause_writing()


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with `Limits`. The app finds it as `state["connection"]` in a request's scope.

    It stays open until the peer closes it, or TCP's keep-alive finds that the peer's host is gone. `waiting`: the task
    of a long-poll, which is cancelled when the connection ends.
    """

    # with more than 30 attributes in its dict, that of each object would take 1.3 KiB more
    __slots__ = (
        "_admitted",
        "_advanced",
        "_head_timer",
        "_in_head",
        "_limits",
        "_strangers",
        "_unfinished_bytes",
        "waiting",
    )

    def __init__(self, strangers: UnauthenticatedConnections, **more: Any) -> None:
        super().__init__(**more)
        self._strangers, self._limits = strangers, strangers.limits
        self._unfinished_bytes, self._advanced, self._in_head = 0, False, False
        self._head_timer: asyncio.TimerHandle | None = None
        self._admitted = True
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self.waiting: asyncio.Task[Any] | None = None

    def welcome(self) -> None:
        """The peer has sent the token. Idempotent."""
        self._strangers.discard(self)

    def abort(self, why: str) -> None:
        """Close the connection without a response."""
        log.info("the connection of %s is ended: %s", self.client, why)
        self._strangers.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.flow = _FlowControl(transport)
        self.server = self._strangers.same_address(self.server)
        self._admitted = self._strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._strangers.lost(self)
        self._stop_head_timer()
        super().connection_lost(exc)
        if self.waiting is not None:
            self.waiting.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self._admitted:
            self._refuse_for_files()
            return
        if self.parser is None:
            self._renew_parser()
        self._advanced = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._unfinished_bytes = 0 if self._advanced else self._unfinished_bytes + len(data)
        if self._unfinished_bytes > self._limits.head_bytes:
            self._refuse(431, f"The request's headers have more than {self._limits.head_bytes} bytes.")
        elif self._in_head and self._head_timer is None:
            late = f"The request's headers were not complete within {self._limits.head_s:g} s."
            self._head_timer = self.loop.call_later(self._limits.head_s, self._refuse, 408, late)

    def _renew_parser(self) -> None:
        """As uvicorn makes it."""
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        """Parser callback."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self  # pyright: ignore[reportTypedDictNotRequiredAccess]
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Parser callback."""
        self._in_head, self._advanced = False, True
        self._stop_head_timer()
        super().on_headers_complete()

    def await_loss(self, scope: MutableMapping[str, Any], task: asyncio.Task[Any] | None) -> None:
        """`task`, which has read the request of `scope`, begins a long-poll. Raises ClientDisconnect.

        Only what is needed for the response is kept: no header (an access log would need them), and no parser, half of
        which are references to the methods of this object.
        """
        if self.transport.is_closing():
            raise ClientDisconnect
        self.waiting = task
        if self.scope is scope:  # else the next request has arrived already
            self.headers = []
            self.cycle.message_event = _BODY_IS_READ
            self.parser = None  # pyright: ignore[reportAttributeAccessIssue]
        needed = {name: scope[name] for name in ("type", "method", "path", "state")}
        scope.clear()
        scope.update(needed)

    def on_body(self, body: bytes) -> None:
        """Parser callback."""
        self._advanced = True
        if self.cycle is not None:  # else the response was complete before the request
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback."""
        self._advanced = True
        if self.cycle is not None:
            super().on_message_complete()

    def whole_body(self, scope: MutableMapping[str, Any], limit: int) -> bytes | None:
        """Take the complete body of the request of `scope`. None, and nothing is taken, if `receive` is needed: the
        body is incomplete or has more than `limit` bytes, the request is not the newest of its connection, or its
        client is gone or waits for "100 Continue".
        """
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or cycle.more_body or len(cycle.body) > limit:
            return None
        if cycle.disconnected or cycle.response_complete or cycle.waiting_for_100_continue:
            return None
        self.flow.resume_reading()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def send_whole(self, scope: MutableMapping[str, Any], headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send the complete response, with status 200, to the request of `scope`, in one write. The headers are ours.

        False, and nothing is sent, if uvicorn's way is needed: the request is not the newest of its connection, the
        client reads too slowly, is gone, or does not keep the connection open.
        """
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or cycle.response_started:
            return False
        if cycle.disconnected or self.flow.write_paused or not cycle.keep_alive:
            return False
        parts = [STATUS_LINE[200]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*parts, b"\r\n", body)))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.on_response()
        return True

    def on_response_complete(self) -> None:
        """Called when a response is written. Nothing of its request is kept, and no timer is started."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self.cycle = None  # type: ignore[assignment]
        if not self._in_head:  # else they are those of the next request
            self.scope, self.headers = None, []  # type: ignore[assignment]

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_for_files(self) -> None:
        most = self._limits.connections
        log.warning("the connection of %s is refused: %d are open, as many as may be. %s", self.client, most, _FILES)
        self._refuse(503, f"This master has {most} connections, as many as it may have.", _FILES)

    def _refuse(self, status: int, detail: str, hint: str = "") -> None:
        """Respond and close; only close while the response to an earlier request is incomplete."""
        log.info("a request of %s is refused: %s", self.client, detail)
        if self.cycle is None or self.cycle.response_complete:
            problem = Problem(
                type="MasterError", title="Request refused", status=status, detail=detail, hint=hint or _HINT
            )
            body = msgspec.json.encode(problem)
            head = b"content-type: application/problem+json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


_HINT = "Send the whole request at once, with fewer and shorter headers."
_FILES = (
    "Raise the limit on open files of the master's process (ulimit -n): a worker has two connections, an agent one."
)
