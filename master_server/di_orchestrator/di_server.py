"""The di-server: jobs of DI-engine ask for replicas, and report how fast they are.

Answers have the form of DI Orchestrator: `{"success": true, "code": 0, "message": "", "data": [...]}`; code 1 is an
error, whose HTTP status says which. The paths are those of its design and those of its code.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from dlrover_hooks.errors import BadRequest, HooksError
from dlrover_hooks.master.di_orchestrator.job_requests import JobRequests
from dlrover_hooks.master.http_answers import bearer, bug, check_bearer, check_browser, malformed, read_body

THREADS = 32
"""Requests that wait for the API server at the same time."""
BODY_LIMIT_BYTES = 1 << 20
"""As much as etcd takes of an object."""
_FAILED = 1


class ReplicasBody(msgspec.Struct, frozen=True):
    """So many replicas more, or fewer."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class ProfilingsBody(msgspec.Struct, frozen=True):
    """What a job has measured."""

    data: dict[str, Any]


_REPLICAS, _PROFILINGS = msgspec.json.Decoder(ReplicasBody), msgspec.json.Decoder(ProfilingsBody)


class DIServer:
    """`asgi` is the application. `close` ends its threads.

    Args:
        requests: what is done.
        token: that requests need as bearer token; None: none.
    """

    def __init__(self, requests: JobRequests, *, token: str | None = None) -> None:
        self._requests, self._token, self._bearer = requests, token, bearer(token)
        self._threads = ThreadPoolExecutor(THREADS, "di-server")
        calls = {
            ("replicas", "GET"): self._addresses, ("replicas", "POST"): self._add, ("replicas", "DELETE"): self._remove,
            ("profilings", "POST"): self._report,
        }  # fmt: skip
        routes = [
            HttpRoute(f"/v2alpha1{place}/{{job_id}}/{what}", functools.partial(self._answer, call), methods=[method])
            for place in ("", "/job") for (what, method), call in calls.items()
        ]  # fmt: skip
        routes.append(HttpRoute("/healthz", self._health))
        self.asgi = Starlette(
            routes=routes, exception_handlers={HTTPException: _refused, HooksError: _failed, Exception: bug}
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    async def _answer(self, call: Callable[[Request, bytes], Response], request: Request) -> Response:
        check_bearer(dict(request.scope["headers"]), self._bearer, "the di-server's")
        request.scope["state"]["connection"].welcome()
        if self._token is None:
            check_browser(request, "di-server")
        try:
            body = await read_body(request, BODY_LIMIT_BYTES)
        except ClientDisconnect:
            return Response(status_code=499)
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(call, request, body))

    def _addresses(self, request: Request, body: bytes) -> Response:
        del body
        found, version = self._requests.addresses(request.path_params["job_id"])
        return _told(found, version)

    def _add(self, request: Request, body: bytes) -> Response:
        return self._change(request, _decoded(_REPLICAS, body).replicas)

    def _remove(self, request: Request, body: bytes) -> Response:
        return self._change(request, -_decoded(_REPLICAS, body).replicas)

    def _change(self, request: Request, count: int) -> Response:
        version = request.headers.get("if-match")
        self._requests.add(request.path_params["job_id"], count, version.strip('"') if version else None)
        return _told([])

    def _report(self, request: Request, body: bytes) -> Response:
        self._requests.report(request.path_params["job_id"], _decoded(_PROFILINGS, body).data)
        return _told([])

    async def _health(self, request: Request) -> Response:
        del request
        return _told([])


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Raises BadRequest."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error, 'Give {"replicas": n}, or {"data": {}}.') from error


def _told(data: list[str], version: str = "") -> Response:
    body = {"success": True, "code": 0, "message": "", "data": data}
    headers = {"ETag": f'"{version}"'} if version else {}
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")


def _error(status: int, message: str, headers: Any = None) -> Response:
    body = {"success": False, "code": _FAILED, "message": message, "data": []}
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HooksError)
    status = 400 if isinstance(error, BadRequest) else error.status
    return _error(status, f"{error.message} {error.hint}".strip())


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)
