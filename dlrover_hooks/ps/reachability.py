"""Whether the servers of a cluster version can be reached from this process.

TensorFlow answers this only after minutes, and it holds Python's lock meanwhile.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from dlrover_hooks.protocol import PSCluster

_CONNECT_S = 5.0
_AGAIN_S = 0.2


def unreachable(cluster: PSCluster, within_s: float, wait: Callable[[float], bool]) -> str:
    """What is wrong with the first server that cannot be reached; empty if all can be. Any thread.

    Args:
        cluster: addresses of the servers. To each a TCP connection is opened, and closed again.
        within_s: limit for all of them together. A server may be about to come up, so a refusal is no answer yet.
        wait: called with seconds between two attempts; True ends them.
    """
    deadline = time.monotonic() + within_s
    servers = [(f"ps:{index}", address) for index, address in enumerate(cluster.ps)]
    servers += [(f"worker:{index}", address) for index, address in enumerate(cluster.workers)]
    for name, address in servers:
        while (problem := _problem(address, min(_CONNECT_S, within_s))) is not None:
            if time.monotonic() >= deadline or wait(_AGAIN_S):
                return f"failed to connect to {name} at {address}: {problem}"
    return ""


def _problem(address: str, timeout_s: float) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError) as error:  # ValueError: the name cannot be encoded
        return str(error)
    return None
