"""The address under which other machines reach this one."""

from __future__ import annotations

import socket


def towards(host: str | None, port: int) -> str:
    """The local address of the route to `host`, without regard to proxies. Sends no packet.

    Raises:
        OSError: there is no route.
    """
    refused: OSError | None = None
    for family, kind, _, _, to in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(to)
                return str(probe.getsockname()[0])
        except OSError as error:
            refused = refused or error
    raise refused or OSError(f"{host} has no address")
