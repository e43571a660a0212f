"""How many collective calls this process has made, and how many of them the training loop made itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

_of_ddp = 0


def of_the_loop() -> int | None:
    """A number that grows with each collective call, in any group, except those made in an `of_ddp` block. None: a
    backend does not count them.
    """
    made = _made()
    return None if made is None else made - _of_ddp


@contextlib.contextmanager
def of_ddp() -> Iterator[None]:
    """Calls in this block are DDP's own. Training thread."""
    global _of_ddp
    before = _made()
    yield
    _of_ddp += (_made() or 0) - (before or 0)


def _made() -> int | None:
    if not dist.is_initialized():
        return 0
    groups = list(cast(Any, distributed_c10d._world.pg_map))
    if not all(group._device_types for group in groups):  # written in Python
        return None
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    try:
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    except RuntimeError:
        return None
