"""The order of the samples: a keyed permutation of range(n) for every epoch, computed from positions. Pure numpy.

A position q is endless: `epoch, place = divmod(q, n)`, sample = `Order.indices(epoch, place)`. Any position can be
requested directly, so a restore costs nothing and memory does not grow with n. Only indices are sent, never samples.

| order          | algo           | used for       | memory        |
|----------------|----------------|----------------|---------------|
| `"shuffle"`    | `keysort`      | n <= 2**17     | n words, 1 MiB at most |
|                | `feistel6`     | larger n       | six keys      |
| `"blocks"`     | `blocks12`     | every n        | 13 keys; a table if one window has all samples |
| `"sequential"` | `sequential`   | every n        | nothing       |

The names are part of the saved state: a changed algorithm needs a new name. Only numpy's Philox *raw stream* is used,
which numpy keeps stable; `Generator.permutation` is not guaranteed to stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from dlrover_hooks.data.block_shuffle import KEYS, Blocks
from dlrover_hooks.data.feistel import Feistel, Indices, keys
from dlrover_hooks.errors import UsageError

TABLE_LIMIT = 1 << 17
ROUNDS = 6
BLOCK, WINDOW = 1024, 64
Kind = Literal["shuffle", "blocks", "sequential"]
KINDS = ("shuffle", "blocks", "sequential")


class Order:
    """The order of n samples in every epoch. Keeps only the key or table of the epoch requested last.

    order: `"shuffle"`, a permutation of all samples; `"blocks"`, see `dlrover_hooks.data.block_shuffle`;
    `"sequential"`. True means "shuffle", False "sequential". block, window: samples in a block and blocks in a
    window, for `"blocks"` only; None = 1024 and 64. seed: in [0, 2**64). Raises UsageError for other values.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        order: Kind | bool = "shuffle",
        *,
        block: int | None = None,
        window: int | None = None,
    ) -> None:
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed={seed} is not in [0, 2**64)", hint=f"seed={seed % (1 << 64)} is")
        self.n, self.seed = n, seed
        self.kind = kind_of(order)
        self.block, self.window = _block_sizes(self.kind, block, window)
        self.algo = algo_for(n, self.kind)
        self._epoch = -1
        self._permute: Callable[[Indices], Indices] = np.asarray

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has its own order."""
        return self.kind != "sequential"

    def fingerprint(self) -> dict[str, Any]:
        """Everything that determines which sample is at a position. Two orders with equal fingerprints are equal."""
        return {
            "n": self.n,
            "seed": self.seed,
            "order": self.kind,
            "block": self.block,
            "window": self.window,
            "algo": self.algo,
        }

    def indices(self, epoch: int, positions: Indices) -> Indices:
        """Sample ids (int64, same shape) at `positions`, each in [0, n), of `epoch`. Best for >= 4096 at a time."""
        if not self.shuffle:
            return positions
        if epoch != self._epoch:
            self._permute = self._permutation(epoch)
            self._epoch = epoch
        return self._permute(positions)

    def onward(self, epoch: int, positions: Indices) -> Indices:
        """`indices` for ascending `positions` that may reach into later epochs: n is the first of the next epoch."""
        if not positions.size or positions[-1] < self.n:
            return self.indices(epoch, positions)
        inside = int(np.searchsorted(positions, self.n))
        rest = self.onward(epoch + 1, positions[inside:] - self.n)
        return np.concatenate([self.indices(epoch, positions[:inside]), rest])

    def _permutation(self, epoch: int) -> Callable[[Indices], Indices]:
        if self.kind == "blocks" and self.n > min(self.block * self.window, TABLE_LIMIT):
            return Blocks(self.n, self.block, self.window, keys(self.seed, epoch, KEYS))
        if self.n <= TABLE_LIMIT:
            return table(self.n, keys(self.seed, epoch, 2)).__getitem__
        network, key = Feistel(self.n), np.array(keys(self.seed, epoch, ROUNDS), dtype=np.uint64)
        return lambda positions: network.forward(positions, key)


def kind_of(order: Kind | bool) -> Kind:
    """The name of an order; True is "shuffle", False "sequential". UsageError for an unknown one."""
    kind: Kind = ("shuffle" if order else "sequential") if isinstance(order, bool) else order
    if kind not in KINDS:
        raise UsageError(f"order={order!r} is not known", hint=f"one of {', '.join(KINDS)}")
    return kind


def algo_for(n: int, order: Kind | bool) -> str:
    """The name of the permutation used for n samples."""
    kind = kind_of(order)
    if kind == "shuffle":
        return "keysort" if n <= TABLE_LIMIT else "feistel6"
    return "blocks12" if kind == "blocks" else kind


def table(n: int, key: list[int]) -> Indices:
    """A shuffle of range(n), n <= 2**17: sorted by random keys, from the raw Philox stream of `key` (two words).

    Each sort key has 47 random bits above the 17 bits of the index. There are no ties, so every sorting algorithm gives
    the same order. This is four times faster than swapping one by one. Each rank makes the entire table at any world
    size.
    """
    raw = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(n)
    low = np.uint64(17)
    drawn = np.sort(raw >> low << low | np.arange(n, dtype=np.uint64))
    return (drawn & np.uint64(TABLE_LIMIT - 1)).astype(np.int64)


def _block_sizes(kind: Kind, block: int | None, window: int | None) -> tuple[int, int]:
    """(block, window) as used; (0, 0) if the order has no blocks."""
    if kind != "blocks":
        if block is not None or window is not None:
            raise UsageError(
                f"block={block} and window={window} mean nothing with order={kind!r}", hint='use order="blocks"'
            )
        return 0, 0
    block, window = BLOCK if block is None else block, WINDOW if window is None else window
    if block < 1 or window < 1:
        raise UsageError(f"block={block} and window={window} must be at least 1", hint="the defaults are 1024 and 64")
    if block * window < 2:
        raise UsageError("blocks of 1 in windows of 1: nothing is shuffled together", hint='use order="shuffle"')
    return block, window
