"""The address of this machine, as others know it."""

from __future__ import annotations

import socket


def towards(host: str | None, port: int) -> str:
    """This machine's address on the way to `host`, where no proxy is between. No packet is sent.

    Raises:
        OSError: there is no way.
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
