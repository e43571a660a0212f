"""A keyed permutation of range(n) that is computed, not stored: a Feistel network. Pure numpy.

It is part of the saved order (`dlrover_hooks.data.order`): any change of the values here needs a new name there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_MUL_IN = np.uint64(0x9E3779B97F4A7C15)
_MUL_OUT = np.uint64(0xD6E8FEB86659FD93)


class Feistel:
    """Alternating Feistel network on the smallest 2**bits >= n; values >= n are permuted again until they are below n.

    key: [rounds] words, or [rounds, size], a key for every requested position. 6 rounds pass the shuffle tests
    for n above 2**17; small n need 12.
    """

    def __init__(self, n: int) -> None:
        bits = max(2, (n - 1).bit_length())
        self.n = np.uint64(n)
        self.high, self.low = bits // 2, bits - bits // 2

    def forward(self, positions: Indices, key: Words) -> Indices:
        """The values, in [0, n), at `positions`, in [0, n); same shape. Efficient for >= 4096 at a time."""
        return self._walk(positions, key, self._pass)

    def backward(self, values: Indices, key: Words) -> Indices:
        """The positions at which `forward` has `values`."""
        return self._walk(values, key, lambda each, keys: self._pass(each, keys, backward=True))

    def _walk(self, given: Indices, key: Words, once: Callable[[Words, Words], Words]) -> Indices:
        values = once(np.reshape(given.astype(np.uint64), -1), key)
        walking = np.flatnonzero(values >= self.n)
        while walking.size:
            moved = once(values[walking], key[:, walking] if key.ndim == 2 else key)
            values[walking] = moved
            walking = walking[moved >= self.n]
        return np.reshape(values.astype(np.int64), given.shape)

    def _pass(self, values: Words, key: Words, backward: bool = False) -> Words:
        low = np.uint64(self.low)
        left, right = values >> low, values & np.uint64((1 << self.low) - 1)
        rounds = range(len(key))
        for i in reversed(rounds) if backward else rounds:  # each round is its own inverse
            if i % 2 == 0:
                left ^= _mix(right, key[i], self.high)
            else:
                right ^= _mix(left, key[i], self.low)
        left <<= low
        left |= right
        return left


def _mix(half: Words, key: np.uint64 | Words, bits: int) -> Words:
    """The round function: `bits` well mixed bits of `half` and `key`. Overflow is intended."""
    mixed = (half + key) * _MUL_IN
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MUL_OUT
    mixed >>= np.uint64(64 - bits)
    return mixed


def keys(seed: int, epoch: int, count: int) -> list[int]:
    """`count` 64-bit keys for one epoch (splitmix64 over seed and epoch)."""
    state = splitmix(splitmix(seed & _MASK) ^ (epoch * int(_MUL_OUT) & _MASK))
    found: list[int] = []
    for _ in range(count):
        state = splitmix(state)
        found.append(state)
    return found


def splitmix(x: int) -> int:
    """64 well mixed bits of the 64 bits of x."""
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix_words(x: Words) -> Words:
    """`splitmix` of every element."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
