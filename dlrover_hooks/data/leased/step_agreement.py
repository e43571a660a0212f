"""Ranks with unequal data make equally many steps: before each one they add up what they have.

One all-reduce of three integers on a group of its own, started while the batch before is trained on, so that nobody
waits for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Totals(NamedTuple):
    """Over all ranks: samples of the step to come, ranks that know the epoch is over, ranks that failed."""

    samples: int
    finished: int
    failed: int


class Agreement:
    """Collective: every rank makes one at the same place, and calls `start` and `totals` in turn. Training thread."""

    def __init__(self, timeout_s: float) -> None:
        self.world: Any = dist.group.WORLD
        self.world_size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._counts = torch.zeros(3, dtype=torch.int64)
        self._work: Any = None

    def start(self, samples: int, *, finished: bool = False, failed: bool = False) -> None:
        """Say what this rank has for the next step; does not wait."""
        self._counts = torch.tensor([samples, finished, failed], dtype=torch.int64)
        self._work = dist.all_reduce(self._counts, group=self._group, async_op=True)

    def totals(self) -> Totals:
        """What all have. Waits for the slowest rank."""
        self._work.wait()
        return Totals(*self._counts.tolist())


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank in the group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
