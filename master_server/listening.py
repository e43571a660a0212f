"""On which address a server of this package listens, with which TLS, and uvicorn's configuration for it."""

from __future__ import annotations

import errno
import functools
import ipaddress
import resource
import socket
import ssl

import msgspec
import uvicorn
from starlette.types import ASGIApp

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.connections import Connection, Limits, UnauthenticatedConnections

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Detect a lost host, whose kernel reports nothing, after 25 s. Connections inherit the listener's options."""
_OTHER_FILES = 128
"""Descriptors for the journal, storage and what Python opens; the rest are for connections."""


class Listening(msgspec.Struct, frozen=True):
    """Where to listen. `server` and `clients` name both sides in errors."""

    host: str
    port: int
    fd: int | None = None
    token: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_client_ca: str | None = None
    server: str = "master"
    clients: str = "the workers"
    open: bool = False
    """Without a token, too: something else limits what reaches the address."""


def listening(options: Listening) -> socket.socket:
    """The socket to serve on. Raises `UsageError`: in use, not of this machine, or open to others without a token."""
    listener = _inherited(options, options.fd) if options.fd is not None else _bound(options)
    _keep_alive(listener)
    return listener


def _bound(options: Listening) -> socket.socket:
    _check_token(options, options.host)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}",
            hint=f"another {options.server} may run there: give --port another number (0 picks a free one)"
            if error.errno == errno.EADDRINUSE
            else "give --host an address of this machine and --port one you may use",
        ) from error
    return listener


def _inherited(options: Listening, fd: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
        address = listener.getsockname()
    except OSError as error:
        raise UsageError(
            f"--fd {fd} is no socket: {error.strerror or error}", hint="pass a listening TCP socket on"
        ) from error
    _check_token(options, str(address[0]))
    return listener


def _keep_alive(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _check_token(options: Listening, host: str) -> None:
    if options.token or options.open or _is_loopback(host):
        return
    raise UsageError(
        f"refusing to listen on {host} without a token: anybody there could steer your training",
        hint=f"set DLROVER_HOOKS_TOKEN (or --token-file) here and for {options.clients}, or listen on 127.0.0.1",
    )


def check_tls(options: Listening) -> None:
    """Check the TLS files before anything is opened: uvicorn would fail later, with a traceback."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is None and options.ssl_client_ca is None:
            return
        raise UsageError("--ssl-keyfile and --ssl-client-ca are of no use by themselves", hint="add --ssl-certfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
        if options.ssl_client_ca is not None:
            context.load_verify_locations(options.ssl_client_ca)
    except OSError as error:
        raise UsageError(
            f"the files for TLS cannot be used (certificate {options.ssl_certfile}, key "
            f"{options.ssl_keyfile or 'in the same file'}, clients' CA {options.ssl_client_ca or 'none'}): {error}",
            hint="give PEM files: --ssl-certfile and its own --ssl-keyfile, which must have no passphrase",
        ) from error


def uvicorn_config(options: Listening, app: ASGIApp) -> uvicorn.Config:
    """With limits on what strangers may hold, and without what nothing here uses."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Limits(
        strangers=max(16, min(Limits().strangers, files // 4)), connections=max(files // 2, files - _OTHER_FILES)
    )
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, UnauthenticatedConnections(limits)),  # type: ignore[arg-type]  # it is only called
        interface="asgi3",
        proxy_headers=False,  # nothing reads them
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        backlog=4096,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=options.ssl_client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_client_ca else ssl.CERT_NONE,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
