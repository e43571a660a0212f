"""One launcher per (job, node): two would train the same job separately and take each other's ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import Iterator

from dlrover_hooks.config import runtime_dir
from dlrover_hooks.errors import LaunchError


@contextlib.contextmanager
def sole(job: str, node: str) -> Iterator[None]:
    """Lock (job, node) for this process within the context. Empty `node`: lock the job for any node name.

    The lock is a listening socket with an abstract name. Unlike a file it disappears with its owner, even after a
    `kill -9`, and the kernel reports the owner's pid.

    Raises:
        LaunchError: another launcher runs; names its pid.
    """
    where = f" on node {node}" if node else " on this machine, and its nodes are one (--nnodes 1)"
    text = f"{runtime_dir()}:{len(job)}:{job}:{node}"
    name = f"\0dlrover-hooks-launcher-{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mine:
        try:
            mine.bind(name)
        except OSError as taken:
            raise LaunchError(
                f"job {job} already runs{where}: its launcher is pid {_owner(name)}",
                hint="stop that one first (kill -INT), or give this one another --job",
            ) from taken
        mine.listen(1024)
        yield


def _owner(name: str) -> int | str:
    """The pid that listens at `name`, from the kernel; "unknown" if that process is just ending."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(OSError):
            probe.connect(name)
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return pid if pid != os.getpid() and pid > 0 else "unknown"
    return "unknown"
