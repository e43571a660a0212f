"""The master's HTTP interface: a starlette app generated from `ROUTES`. Errors are sent as problem+json (RFC 9457)."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from dlrover_hooks.errors import BadRequest, HooksError
from dlrover_hooks.master import openapi
from dlrover_hooks.master.connections import Connection
from dlrover_hooks.master.core.events import Key
from dlrover_hooks.master.http_answers import (
    BODY_LIMIT_BYTES,
    bearer,
    bug,
    check_bearer,
    check_browser,
    http_problem,
    malformed,
    plain,
    problem,
    read_body,
    with_status,
)
from dlrover_hooks.master.metrics import Metrics
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.protocol import PROTOCOL, ROUTES, Message, Route

PROTOCOL_HEADER = "X-Dlrover-Hooks-Protocol"
KEY_HEADER = "Idempotency-Key"
_PROTOCOL_HEADER, _KEY_HEADER = PROTOCOL_HEADER.lower().encode(), KEY_HEADER.lower().encode()
_KEY = re.compile(r"([^/]+)/([^/]+)/([0-9]{1,15})")
"""INCARNATION/CHANNEL/SEQ."""
_SPOKEN = (b"%d" % PROTOCOL, b"%d" % (PROTOCOL - 1))
Endpoint = Callable[[Request], Awaitable[Response]]


class App:
    """Holds the objects that the endpoints share. `asgi` is the application."""

    def __init__(
        self, runtime: Runtime, metrics: Metrics, *, token: str | None = None, body_limit_bytes: int = BODY_LIMIT_BYTES
    ) -> None:
        self.runtime, self.metrics = runtime, metrics
        self._token, self._body_limit_bytes = token, body_limit_bytes
        self._bearer = bearer(token)
        self._openapi = msgspec.json.encode(openapi.document())
        self._by_path = {row.path: _Endpoint(self, row).answer for row in ROUTES if row.method == "POST"}
        self._starlette = Starlette(
            routes=[
                *(
                    HttpRoute(_with_slashes(row.path), _Endpoint(self, row).answer, methods=[row.method])
                    for row in _LONGEST_FIRST
                ),
                HttpRoute("/healthz", self._health),
                HttpRoute("/readyz", self._ready),
                HttpRoute("/openapi.json", self._describe),
                HttpRoute("/metrics", self._measure),
            ],
            exception_handlers={HTTPException: http_problem, HooksError: problem, Exception: bug},
        )

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application. Requests of the protocol's fixed paths, of which thousands may wait at the same time, do not
        pass through starlette's router and middleware.
        """
        endpoint = self._by_path.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._starlette(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:
            response = await bug(request, error)
        await response(scope, receive, send)

    # ---- routes of the protocol --------------------------------------------------------------------------------------

    async def read(
        self, row: Route, decoder: msgspec.json.Decoder[Any], request: Request
    ) -> tuple[Message, Key | None]:
        """The message of an authorized request, and its idempotency key if it is an event."""
        headers = dict[bytes, bytes](request.scope["headers"])  # starlette's would be searched for each name
        self._authorize(request, headers)
        if self._token is None:
            check_browser(request, "master")
        _check_protocol(headers)
        if row.in_url:
            message = _from_url(row, request)
        else:
            body = request.scope["state"]["connection"].whole_body(request.scope, self._body_limit_bytes)
            message = _decode(decoder, body if body is not None else await read_body(request, self._body_limit_bytes))
        return message, _key(headers, message) if row.event else None

    def _authorize(self, request: Request, headers: Mapping[bytes, bytes]) -> None:
        check_bearer(headers, self._bearer, "the master's")
        request.scope["state"]["connection"].welcome()

    # ---- routes outside the protocol ---------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        del request
        return plain({"status": "ok", "pid": os.getpid(), "life": self.runtime.life})

    async def _ready(self, request: Request) -> Response:
        del request
        reason = await self.runtime.ready()
        return plain({"status": reason or "ready", "life": self.runtime.life}, 503 if reason else 200)

    async def _describe(self, request: Request) -> Response:
        del request
        return Response(self._openapi, media_type="application/json")

    async def _measure(self, request: Request) -> Response:
        self._authorize(request, dict(request.scope["headers"]))
        return Response(
            self.metrics.text(self.runtime.state, self.runtime.nodes),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )


class _Endpoint:
    """Answers the requests of one row of `ROUTES`.

    Thousands of long-polls are open at the same time, so `answer` is one coroutine: each call of another one that waits
    would take 300 bytes in each of them.
    """

    def __init__(self, app: App, row: Route) -> None:
        self._app, self._row, self._decoder = app, row, msgspec.json.Decoder(row.request)
        self._counters: dict[int, Counter] = {}

    async def answer(self, request: Request) -> Response:
        """The response to `request`, an error's one, too."""
        status, runtime = 500, self._app.runtime
        try:
            message, key = await self._app.read(self._row, self._decoder, request)
            if self._row.waits:
                connection: Connection = request.scope["state"]["connection"]
                # cancels this task: so the death of a client is detected at once
                connection.await_loss(request.scope, asyncio.current_task())
                try:
                    response: Response = _Reply(await runtime.wait(cast(Any, message)))
                except asyncio.CancelledError:
                    if connection.transport.is_closing():
                        raise ClientDisconnect from None
                    raise
                finally:
                    connection.waiting = None
            elif self._row.event:
                response = _Reply(await runtime.event(message, key))
            else:
                response = _Reply(await runtime.query(message))
            status = 200
        except ClientDisconnect:
            status = 499
            response = Response(status_code=499)
        except HooksError as error:
            response = await problem(request, error)
            status = response.status_code
        finally:
            if status not in self._counters:
                self._counters[status] = self._app.metrics.requests.labels(self._row.path, str(status))
            self._counters[status].inc()
        return response


def _with_slashes(path: str) -> str:
    """Let names contain slashes: clients quote them, and the server receives them unquoted."""
    return path.replace("}", ":path}")


_LONGEST_FIRST = sorted(ROUTES, key=lambda row: -len(row.path))
"""Longer paths are matched first: otherwise a name with slashes would match the rest of a longer path."""


def _from_url(row: Route, request: Request) -> Message:
    try:
        return msgspec.convert({**request.query_params, **request.path_params}, row.request, strict=False)
    except msgspec.ValidationError as error:
        raise malformed(error) from error


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Message:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from error


def _check_protocol(headers: Mapping[bytes, bytes]) -> None:
    spoken = headers.get(_PROTOCOL_HEADER)
    if spoken is None or spoken in _SPOKEN:
        return
    error = BadRequest(
        f"The protocol of this master is {PROTOCOL} and {PROTOCOL - 1}, the client {spoken.decode('latin-1')}.",
        hint="Install the same minor version of dlrover-hooks for the master and the workers.",
    )
    raise with_status(error, 406)


def _key(headers: Mapping[bytes, bytes], message: Message) -> Key | None:
    found = headers.get(_KEY_HEADER)
    if found is None:
        return None
    text = found.decode("latin-1")
    if (parts := _KEY.fullmatch(text)) is None:
        error = BadRequest(f"{KEY_HEADER} {text!r} is malformed.", hint="Expected INCARNATION/CHANNEL/SEQ.")
        raise with_status(error, 400)
    incarnation, channel, seq = parts.groups()
    if incarnation != getattr(message, "incarnation", incarnation):
        raise BadRequest(f"{KEY_HEADER} {text!r} is not the sender's.", hint="Start it with the message's incarnation.")
    return Key(incarnation=incarnation, channel=channel, seq=int(seq))


class _Reply(Response):
    """The reply to a request of the protocol; starlette would encode its headers again for each."""

    def __init__(self, message: Message) -> None:
        self.status_code, self.background, self.body = 200, None, msgspec.json.encode(message)
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See starlette's Response. uvicorn's `send` examines each header, and is called twice."""
        if not scope["state"]["connection"].send_whole(scope, self.raw_headers, self.body):
            await super().__call__(scope, receive, send)
