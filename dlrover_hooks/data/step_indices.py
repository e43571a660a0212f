"""Sample ids, one optimizer step at a time, for loops that fetch by index. No torch.

A step takes the next `global_batch_size` positions of the endless order. With `share` each rank takes its slice of them
as one batch, so a step has the same samples at any world size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.data.batch_plan import BatchPlan
from dlrover_hooks.data.cursor import Progress
from dlrover_hooks.data.feistel import Indices
from dlrover_hooks.data.order import Order
from dlrover_hooks.data.saved_position import refuse_other, saved_position

_AHEAD = 4096
"""Ids are computed for so many samples at once: the fixed cost, 30 us, would be one of each step."""


class Share(NamedTuple):
    """One rank's rows [lo, hi) of a step, and their weight in the step's mean. At least one row, maybe of weight 0."""

    lo: int
    hi: int
    weight: float


@functools.lru_cache(maxsize=64)
def share(samples: int, rank: int, world_size: int) -> Share:
    """The rows of `rank` of a step of `samples`. A rank without any repeats the first, so that it takes part.

    The weights are for a SUM over ranks of the gradients of each rank's mean loss.
    """
    lo, hi = samples * rank // world_size, samples * (rank + 1) // world_size
    return Share(lo, hi, (hi - lo) / samples) if lo < hi else Share(0, 1, 0.0)


class StepIndices:
    """The steps of `n` samples in epochs, from any position on. One thread, but `indices` may be called by any.

    Args:
        n: samples in an epoch.
        global_batch_size: samples of a step over all ranks; the last step of an epoch has the rest.
        shuffle: another order in every epoch.
        seed: of the order.

    `begin` starts an epoch, or the rest of one after a restore. `on_batch` counts a step whose gradients are applied,
    `mark` and `commit` are those of `dlrover_hooks.data.cursor.Progress`. Raises UsageError for invalid sizes.
    """

    def __init__(self, n: int, global_batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.order = Order(n, seed, shuffle)
        self._progress = Progress(BatchPlan(n, global_batch_size, global_batch_size))
        """Counts steps: one micro-batch of a single rank is a step here."""
        self._ahead: tuple[int, int, Indices] = -1, 0, np.empty(0, np.int64)
        """An epoch, a position in it, and the ids from there on."""

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step, over all ranks."""
        return self._progress.plan.global_batch_size

    @property
    def left(self) -> int:
        """Steps of the epoch that `begin` started last."""
        return self._progress.plan.length(self._progress.base % self.order.n)

    @property
    def epoch(self) -> int:
        """Number of complete passes before the epoch that `begin` started last."""
        return self._progress.base // self.order.n

    @property
    def within_epoch(self) -> bool:
        """True if the cursor is in the middle of an epoch."""
        return self._progress.cursor % self.order.n > 0

    def begin(self) -> None:
        """Start an epoch; after a restore, continue the one of the cursor. Idempotent until a step is counted."""
        self._progress.begin()

    def indices(self, number: int) -> Indices:
        """Ids (int64) of the samples in step `number` since `begin`. Raises UsageError after the epoch's last step."""
        plan = self._progress.plan
        epoch, q = divmod(self._progress.base, plan.n)
        lo = q + number * plan.global_batch_size
        hi = min(lo + plan.global_batch_size, plan.n)
        of, begin, ids = self._ahead
        if of != epoch or not begin <= lo < hi <= begin + len(ids):
            plan.step(lo)  # raises after the last step
            begin, end = lo, max(hi, min(lo + _AHEAD, plan.n))
            ids = self.order.indices(epoch, np.arange(begin, end))
            self._ahead = epoch, begin, ids
        return ids[lo - begin : hi - begin]

    def on_batch(self) -> None:
        """The gradients of one more step were applied."""
        self._progress.on_batch()

    def mark(self) -> int:
        """See `Progress.mark`."""
        return self._progress.mark()

    def commit(self) -> int:
        """See `Progress.commit`."""
        return self._progress.commit()

    def state_dict(self) -> dict[str, Any]:
        """The committed position, and what determines the order. The same on every rank."""
        return saved_position(self.order, self._progress.cursor, self._progress.plan.tail, self.global_batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the state's cursor with the next `begin`. Raises DataMismatch: the state is of other data."""
        refuse_other(state, self.order)
        self._progress.rewind(BatchPlan(self.order.n, state["G"], state["G"]), state["cursor"])
