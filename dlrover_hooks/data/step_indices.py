"""Sample ids of this rank, one optimizer step at a time, for loops that fetch by index. No torch.

A step takes the next `global_batch_size` positions of the endless order; each rank takes a contiguous slice of them as
one batch. So the batch of a rank is smaller at a larger world size, and a step has the same samples at any world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrover_hooks.data.batch_plan import BatchPlan, Slice
from dlrover_hooks.data.cursor import Progress
from dlrover_hooks.data.data_mismatch import refuse_other
from dlrover_hooks.data.feistel import Indices
from dlrover_hooks.data.order import Order

VERSION = 2


class StepIndices:
    """The steps of `n` samples in epochs, from any position on. One thread, but `indices` may be called by any.

    Args:
        n: samples in an epoch.
        global_batch_size: samples of a step over all ranks; the last step of an epoch has the rest.
        rank, world_size: of this process.
        shuffle: another order in every epoch.
        seed: of the order.

    `begin` starts an epoch, or the rest of one after a restore. `on_batch` counts a step whose gradients are applied,
    `mark` and `commit` are those of `dlrover_hooks.data.cursor.Progress`. Raises UsageError for invalid sizes.
    """

    def __init__(
        self, n: int, global_batch_size: int, *, rank: int = 0, world_size: int = 1, shuffle: bool = True, seed: int = 0
    ) -> None:
        self.order = Order(n, seed, shuffle)
        self._share = BatchPlan(n, 1, global_batch_size, rank, world_size)
        self._progress = Progress(BatchPlan(n, global_batch_size, global_batch_size))
        """Counts steps: one micro-batch of a single rank is a step here."""

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step, over all ranks."""
        return self._share.global_batch_size

    @property
    def steps(self) -> int:
        """Steps of a complete epoch."""
        return self._progress.plan.length()

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
        """Ids (int64) of this rank's samples in step `number` since `begin`."""
        part = self._part(number)
        return self.order.indices(self.epoch, np.arange(part.lo, part.hi))

    def weight(self, number: int) -> float:
        """Share of this rank's mean gradient in step `number`, for a SUM over ranks."""
        part = self._part(number)
        return 0.0 if part.ghost else (part.hi - part.lo) / part.samples

    def _part(self, number: int) -> Slice:
        q = self._progress.base % self.order.n + number * self._share.global_batch_size
        return self._share.step(q)

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
        moving = {"cursor": self._progress.cursor, "tail": "ghost", "G": self._share.global_batch_size}
        return {"v": VERSION} | self.order.fingerprint() | moving

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the state's cursor with the next `begin`. Raises DataMismatch: the state is of other data."""
        refuse_other(state, {"v": VERSION} | self.order.fingerprint())
        old = self._share
        self._share = BatchPlan(old.n, 1, state["G"], old.rank, old.world_size)
        self._progress.rewind(BatchPlan(old.n, state["G"], state["G"]), state["cursor"])
