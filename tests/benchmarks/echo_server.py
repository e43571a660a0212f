"""A bare starlette app that returns the body of a POST: `python -m tests.benchmarks.echo_server FD`.

It shows what HTTP alone costs: the same uvicorn, parser, event loop and thresholds of the garbage collector as the
master's, without its limits.
"""

from __future__ import annotations

import gc
import socket
import sys

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dlrover_hooks.master.__main__ import _COLLECT_AT


async def echo(request: Request) -> Response:
    """The body, as JSON."""
    return Response(await request.body(), media_type="application/json")


def main() -> None:
    """Serve until killed."""
    gc.set_threshold(*_COLLECT_AT)
    config = uvicorn.Config(
        Starlette(routes=[Route("/echo", echo, methods=["POST"])]),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    uvloop.run(uvicorn.Server(config).serve(sockets=[socket.socket(fileno=int(sys.argv[1]))]))


if __name__ == "__main__":
    main()
