"""Lets ranks with unequal data make equally many steps: before each step they sum up how much data they have.

One all-reduce of three integers on a separate group, started while the previous batch is trained on, so that no rank
waits for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist


class Totals(NamedTuple):
    """Over all ranks: samples of the next step, ranks whose epoch is over, ranks that failed."""

    samples: int
    finished: int
    failed: int


class Agreement:
    """Collective: every rank makes one at the same point, and calls `start` and `totals` in turn. Training thread."""

    def __init__(self, timeout_s: float) -> None:
        self.world: Any = dist.group.WORLD
        self.world_size = dist.get_world_size()
        self._group: Any = cast(Any, dist).new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._counts = torch.zeros(3, dtype=torch.int64)
        self._work: Any = None

    def start(self, samples: int, *, finished: bool = False, failed: bool = False) -> None:
        """Send what this rank has for the next step; does not wait."""
        self._counts = torch.tensor([samples, finished, failed], dtype=torch.int64)
        self._work = cast(Any, dist).all_reduce(self._counts, group=self._group, async_op=True)

    def totals(self) -> Totals:
        """The totals over all ranks. Waits for the slowest rank."""
        self._work.wait()
        return Totals(*cast(Any, self._counts).tolist())


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank in the group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
