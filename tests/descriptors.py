"""A process that has used up its file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

MOST = 1024


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Within it nothing can be opened in this process (EMFILE)."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = list[int]()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST, limits[1]), limits[1]))
        source = os.open(os.devnull, os.O_RDONLY)
        taken.append(source)
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(source))
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
