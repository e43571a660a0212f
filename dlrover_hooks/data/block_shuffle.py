"""`order="blocks"`: shuffled, yet readable in runs. Storage locality, not a full shuffle. Pure numpy.

The samples are cut into blocks of `block` (the last may be short), the blocks are permuted, and each `window` blocks
that are then neighbours are shuffled together, sample by sample. So an epoch reads each block within one window, and a
reader must hold `window * block` samples (twice that in the last window). The batches of a window have samples of its
blocks only: if blocks differ (sorted or grouped data), windows differ too.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from dlrover_hooks.data.feistel import Feistel, Indices, Words, splitmix_words

ROUNDS = 12
"""Windows and numbers of blocks may be small, and 6 rounds are visibly uneven there."""
KEYS = ROUNDS + 1


class Blocks:
    """The order of one epoch: a bijection of range(n) for every n. Stores 13 keys, no table.

    key: KEYS words. After shuffling, place j has block `permuted[j]`; one place, `gap`, has the short block.
    """

    def __init__(self, n: int, block: int, window: int, key: list[int]) -> None:
        self.block, self.window = block, window
        self.count = -(-n // block)
        self.missing = self.count * block - n
        self.windows = max(1, self.count // window)
        self._key, self._salt = np.array(key[:ROUNDS], dtype=np.uint64), np.uint64(key[ROUNDS])
        self._permuted = Feistel(self.count)
        self.gap = int(self._permuted.backward(np.array([self.count - 1]), self._key)[0])

    def __call__(self, positions: Indices) -> Indices:
        """Sample ids at `positions`, in [0, n); same shape."""
        asked = np.reshape(positions, -1)
        moved = self._within_windows(asked)
        place = self._place(moved)
        ids = self._permuted.forward(place, self._key) * self.block + moved - self._begin(place)
        return np.reshape(ids, positions.shape)

    def _within_windows(self, positions: Indices) -> Indices:
        """The positions, each moved within its window."""
        window = np.minimum(self._place(positions) // self.window, self.windows - 1)
        begin = self._begin(window * self.window)
        behind = np.where(window == self.windows - 1, self.count, (window + 1) * self.window)
        size = self._begin(behind) - begin
        key, moved = self._window_keys(window), np.empty_like(positions)
        for each in np.unique(size).tolist():  # 4 at most: with the short block or not, the last one or not
            here = np.flatnonzero(size == each)
            moved[here] = Feistel(each).forward(positions[here] - begin[here], key[:, here])
        return moved + begin

    def _window_keys(self, window: Indices) -> Words:
        """[ROUNDS, size]: each window has its own keys."""
        unique, inverse = cast("tuple[Indices, Indices]", np.unique(window, return_inverse=True))
        salted: Words = np.bitwise_xor(self._salt, splitmix_words(unique.astype(np.uint64)))
        state, rows = splitmix_words(salted), list[Words]()
        for _ in range(ROUNDS):
            state = splitmix_words(state)
            rows.append(state)
        return np.stack(rows)[:, np.reshape(inverse, -1)]

    def _begin(self, place: Indices) -> Indices:
        """First position of a place in the permuted row of blocks; n for the place after the last."""
        return place * self.block - (place > self.gap) * self.missing

    def _place(self, positions: Indices) -> Indices:
        """The place that contains a position."""
        behind_gap = (self.gap + 1) * self.block - self.missing
        return (positions + (positions >= behind_gap) * self.missing) // self.block
