"""`order="blocks"`: shuffled, yet readable in runs. Storage locality, not a full shuffle. Pure numpy.

The samples are cut into blocks of `block` (the last may be short), the blocks are permuted, and `window` blocks that
are neighbours then are shuffled together, sample by sample. So an epoch reads each block within one window, and
`window * block` samples (twice that in the last window) is what a reader must have at hand. The batches of a window
hold samples of its blocks only: where blocks differ (sorted or grouped data), so do windows.
"""

from __future__ import annotations

import numpy as np

from dlrover_hooks.data.feistel import Feistel, Indices, Words, splitmix_words

ROUNDS = 12
"""Windows and counts of blocks may be small, where 6 rounds are visibly uneven."""
KEYS = ROUNDS + 1


class Blocks:
    """The order of one epoch: a bijection of range(n) for every n. Holds 13 keys, no table.

    key: KEYS words. `shuffled` place j holds block `permuted[j]`; one place, `gap`, has the short block.
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
        asked = positions.reshape(-1)
        moved = self._within_windows(asked)
        place = self._place(moved)
        ids = self._permuted.forward(place, self._key) * self.block + moved - self._begin(place)
        return ids.reshape(positions.shape)

    def _within_windows(self, positions: Indices) -> Indices:
        """Positions again, each moved within its window."""
        window = np.minimum(self._place(positions) // self.window, self.windows - 1)
        begin = self._begin(window * self.window)
        behind = np.where(window == self.windows - 1, self.count, (window + 1) * self.window)
        size = self._begin(behind) - begin
        key, moved = self._window_keys(window), np.empty_like(positions)
        for each in np.unique(size).tolist():  # 4 at most: whole or with the short block, the last one or not
            here = np.flatnonzero(size == each)
            moved[here] = Feistel(each).forward(positions[here] - begin[here], key[:, here])
        return moved + begin

    def _window_keys(self, window: Indices) -> Words:
        """[ROUNDS, size]: each window has keys of its own."""
        unique, inverse = np.unique(window, return_inverse=True)
        state, rows = splitmix_words(self._salt ^ splitmix_words(unique.astype(np.uint64))), []
        for _ in range(ROUNDS):
            state = splitmix_words(state)
            rows.append(state)
        return np.stack(rows)[:, inverse.reshape(-1)]

    def _begin(self, place: Indices) -> Indices:
        """First position of a place in the permuted row of blocks; of the place behind the last: n."""
        return place * self.block - (place > self.gap) * self.missing

    def _place(self, positions: Indices) -> Indices:
        """The place that a position lies in."""
        behind_gap = (self.gap + 1) * self.block - self.missing
        return (positions + (positions >= behind_gap) * self.missing) // self.block
