"""Paths of Unix sockets, which the kernel limits to 107 bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """An alias of `path` that is short enough for a Unix socket, valid inside the context. Raises OSError."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
