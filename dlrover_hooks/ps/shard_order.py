"""Which shards of the data a parameter server job trains on, in which order, and which of them are in the model.

A shard is a range of sample numbers, in the order of the files. One shard is one step. The chief hands out all shards,
so their number says which of them are in the model. The number is stored in the checkpoint: after a restore exactly the
other shards are trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.data.order import Order
from dlrover_hooks.data.saved_position import refuse_other, saved_position
from dlrover_hooks.errors import DataMismatch, UsageError


class Shard(NamedTuple):
    """Samples `begin` to `end - 1`, for one step. `number`: the place in the order, over all epochs."""

    number: int
    begin: int
    end: int


class ShardOrder:
    """The shards of `epochs` passes over `samples` samples. One thread.

    Args:
        samples: of an epoch.
        shard_size: samples of a step; the last shard of an epoch may have fewer.
        epochs: passes over the data.
        shuffle: the shards of each epoch are handed out in another order; the samples within one stay in theirs.
        seed: of the order.

    Raises:
        UsageError: a size is not positive.
    """

    def __init__(self, samples: int, shard_size: int, epochs: int = 1, *, shuffle: bool = True, seed: int = 0) -> None:
        for name, value in (("samples", samples), ("shard_size", shard_size), ("epochs", epochs)):
            if value < 1:
                raise UsageError(f"{name}={value!r}: it must be 1 or more")
        self._samples, self._shard_size = samples, shard_size
        self._order = Order(-(-samples // shard_size), seed, shuffle)
        self.total = self._order.n * epochs
        """Shards of all epochs."""
        self.committed = 0
        """Shards that are in the newest checkpoint."""
        self.next = 0
        """Number of the shard that `take` returns next."""

    def take(self) -> Shard | None:
        """The next shard; None: all were handed out."""
        if self.next == self.total:
            return None
        epoch, place = divmod(self.next, self._order.n)
        begin = int(self._order.indices(epoch, np.array([place]))[0]) * self._shard_size
        self.next += 1
        return Shard(self.next - 1, begin, min(begin + self._shard_size, self._samples))

    def commit(self) -> None:
        """All shards handed out so far are in a checkpoint."""
        self.committed = self.next

    def rollback(self) -> None:
        """The model was restored from the newest checkpoint: hand out again what is not in it."""
        self.next = self.committed

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint that holds all shards handed out so far, and what determines the order."""
        own = {"samples": self._samples, "shard_size": self._shard_size}
        return saved_position(self._order, self.next, "ghost", 1) | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the shards of `state`. Raises DataMismatch (nothing is changed): it is of other data."""
        for name, value in (("samples", self._samples), ("shard_size", self._shard_size)):
            if state.get(name) != value:
                raise DataMismatch(
                    f"the data state has {name}={state.get(name)!r}, here it is {value!r}",
                    hint=f"give the {name} of the first start, or start over",
                )
        refuse_other(state, self._order)
        self.next = self.committed = min(state["cursor"], self.total)
