"""The address of this machine, as others know it."""

from __future__ import annotations

import socket


def towards(host: str | None, port: int) -> str:
    """This machine's address on the way to `host`, where no proxy is between. No packet is sent.

    Raises:
        OSError: there is no way.
    """
    family, kind, _, _, to = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)
        return str(probe.getsockname()[0])
