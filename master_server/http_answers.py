"""What the HTTP servers of this package have in common: tokens, bodies, and errors as problem+json (RFC 9457)."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dlrover_hooks.errors import BadRequest, HooksError, TooLarge, Unauthorized
from dlrover_hooks.protocol import Problem

log = logging.getLogger("dlrover_hooks.master")
BODY_LIMIT_BYTES = 16 * 2**20


def bearer(token: str | None) -> bytes | None:
    """The header that requests need. None: no token is needed."""
    return _header_value(f"Bearer {token}") if token is not None else None


def check_bearer(headers: Mapping[bytes, bytes], wanted: bytes | None, owner: str) -> None:
    """Raises `Unauthorized`. `owner`: of the token, for the hint."""
    if wanted is not None and not hmac.compare_digest(headers.get(b"authorization", b""), wanted):
        raise Unauthorized("The bearer token is wrong or missing.", hint=f"Set DLROVER_HOOKS_TOKEN to {owner} token.")


async def read_body(request: Request, limit: int) -> bytes:
    """The complete body. Up to 4 times the limit is read, so that the sender of a larger body gets the error."""
    chunks: list[bytes] = []
    size, more = 0, True
    while more and size <= 4 * limit:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
    if size > limit:
        raise TooLarge(f"The body has more than {limit} bytes.", hint="Raise --body-limit-bytes, or send less at once.")
    return b"".join(chunks)


def malformed(error: Exception, hint: str = "See /openapi.json.") -> BadRequest:
    """The error for a body or a query that cannot be decoded."""
    return with_status(BadRequest(f"The body or the query is malformed: {error}.", hint=hint), 400)


def with_status(error: BadRequest, status: int) -> BadRequest:
    """`error`, reported with another HTTP status."""
    error.status = status
    return error


def check_browser(request: Request, server: str) -> None:
    """Refuse requests from web pages if there is no token.

    A page in a browser on this machine could otherwise send requests as its user: with a form, or through a host name
    of its own that resolves to this address (DNS rebinding).
    """
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers or not _names_this_machine(host):
        error = BadRequest(
            f"A {server} without a token answers no web page (Origin {request.headers.get('origin', 'none')!r}, "
            f"Host {host!r}).",
            hint=f"Use its IP address or localhost, or give the {server} a token.",
        )
        raise with_status(error, 403)
    if request.method == "POST" and kind != "application/json":
        error = BadRequest(f"The body's type is {kind or 'not given'!r}.", hint="Send Content-Type: application/json.")
        raise with_status(error, 415)


def _names_this_machine(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return host == "localhost"


def _header_value(text: str) -> bytes:
    """As clients send it: in Latin-1 if possible."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def plain(fields: dict[str, Any], status: int = 200) -> Response:
    """JSON."""
    return Response(msgspec.json.encode(fields), status_code=status, media_type="application/json")


async def problem(request: Request, error: Exception) -> Response:
    """The response to a request that a `HooksError` ended."""
    del request
    assert isinstance(error, HooksError)
    name = type(error).__name__
    body = Problem(type=name, title=name, status=error.status, detail=error.message, hint=error.hint)
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    if isinstance(error, TooLarge):
        headers["Connection"] = "close"
    return Response(
        msgspec.json.encode(body), status_code=error.status, headers=headers, media_type="application/problem+json"
    )


async def http_problem(request: Request, error: Exception) -> Response:
    """The response to a request that starlette refused."""
    assert isinstance(error, HTTPException)
    body = Problem(
        type="MasterError",
        title=error.detail,
        status=error.status_code,
        detail=f"{request.method} {request.url.path}: {error.detail}.",
        hint="See /openapi.json for what is answered here.",
    )
    return Response(
        msgspec.json.encode(body),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/problem+json",
    )


async def bug(request: Request, error: Exception) -> Response:
    """The response to a request that an unexpected error ended."""
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    body = Problem(
        type="MasterError",
        title="Internal error",
        status=500,
        detail=f"{type(error).__name__} in the master, see its log.",
        hint="This is a bug of dlrover-hooks: please report it with the master's log.",
    )
    return Response(msgspec.json.encode(body), status_code=500, media_type="application/problem+json")
