"""The order of the samples: a keyed permutation of range(n) for every epoch, computed from positions. Pure numpy.

A position q is endless: `epoch, place = divmod(q, n)`, sample = `Order.indices(epoch, place)`. Any place can be
asked for directly, so a restore costs nothing and memory does not grow with n (issue 2 item 5; DL-64: indices
travel, samples do not).

| algo           | used for            | memory        |
|----------------|---------------------|---------------|
| `fisher-yates` | shuffle, n <= 2**17 | n words, 1 MiB at most |
| `feistel6`     | shuffle, n above    | six keys      |
| `sequential`   | no shuffle          | nothing       |

The names are part of the saved state: changing what one of them computes is a new name. Only numpy's Philox *raw
stream* is used, which numpy keeps stable; `Generator.permutation` is not promised to stay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

TABLE_LIMIT = 1 << 17
ROUNDS = 6
Indices = NDArray[np.int64]

_MASK = (1 << 64) - 1
_MUL_IN = np.uint64(0x9E3779B97F4A7C15)
_MUL_OUT = np.uint64(0xD6E8FEB86659FD93)


def algo_for(n: int, shuffle: bool) -> str:
    """The name of the permutation used for n samples."""
    if not shuffle:
        return "sequential"
    return "fisher-yates" if n <= TABLE_LIMIT else "feistel6"


class Order:
    """The order of n samples in every epoch. Keeps the key or table of the epoch asked for last, no other."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self.algo = algo_for(n, shuffle)
        self._epoch = -1
        self._permute: Callable[[Indices], Indices] = np.asarray

    def indices(self, epoch: int, positions: Indices) -> Indices:
        """Sample ids (int64, same shape) at `positions`, each in [0, n), of `epoch`. Ask for >= 4096 at a time."""
        if not self.shuffle:
            return positions
        if epoch != self._epoch:
            self._permute = self._permutation(epoch)
            self._epoch = epoch
        return self._permute(positions)

    def _permutation(self, epoch: int) -> Callable[[Indices], Indices]:
        if self.algo == "fisher-yates":
            return table(self.n, keys(self.seed, epoch, 2)).__getitem__
        return Feistel(self.n, keys(self.seed, epoch, ROUNDS))


def keys(seed: int, epoch: int, count: int) -> list[int]:
    """`count` 64-bit keys for one epoch (splitmix64 over seed and epoch)."""
    state = _splitmix(_splitmix(seed & _MASK) ^ (epoch * int(_MUL_OUT) & _MASK))
    found: list[int] = []
    for _ in range(count):
        state = _splitmix(state)
        found.append(state)
    return found


def table(n: int, key: list[int]) -> Indices:
    """A Fisher-Yates shuffle of range(n), n <= 2**17, drawn from the raw Philox stream of `key` (two words)."""
    raw = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(n)
    sizes = np.arange(n, 0, -1, dtype=np.uint64)
    draws = (
        (raw >> np.uint64(17)) * sizes >> np.uint64(47)
    ).tolist()  # 47 random bits times at most 2**17: no overflow
    cards = list(range(n))
    for last, pick in zip(range(n - 1, 0, -1), draws, strict=False):
        cards[last], cards[pick] = cards[pick], cards[last]
    return np.array(cards, dtype=np.int64)


class Feistel:
    """Alternating Feistel network on the smallest 2**bits >= n; values >= n walk on along their cycle."""

    def __init__(self, n: int, key: list[int]) -> None:
        bits = max(2, (n - 1).bit_length())
        self.n = np.uint64(n)
        self.high, self.low = bits // 2, bits - bits // 2
        self.key = [np.uint64(k) for k in key]

    def __call__(self, positions: Indices) -> Indices:
        values = self._pass(positions.astype(np.uint64).reshape(-1))
        walking = np.flatnonzero(values >= self.n)
        while walking.size:
            moved = self._pass(values[walking])
            values[walking] = moved
            walking = walking[moved >= self.n]
        return values.astype(np.int64).reshape(positions.shape)

    def _pass(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low = np.uint64(self.low)
        left, right = values >> low, values & np.uint64((1 << self.low) - 1)
        for i, key in enumerate(self.key):
            if i % 2 == 0:
                left ^= _mix(right, key, self.high)
            else:
                right ^= _mix(left, key, self.low)
        left <<= low
        left |= right
        return left


def _mix(half: NDArray[np.uint64], key: np.uint64, bits: int) -> NDArray[np.uint64]:
    """The round function: `bits` well mixed bits of `half` and `key`. Overflow is meant."""
    mixed = (half + key) * _MUL_IN
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MUL_OUT
    mixed >>= np.uint64(64 - bits)
    return mixed


def _splitmix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
