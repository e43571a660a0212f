"""What is trained: a set of sample positions stands for the weights."""

from __future__ import annotations

import zlib
from typing import NamedTuple

SPAN = 4096
"""Positions of a partition: its number times this, plus the offset, is the bit of a position."""


class Model(NamedTuple):
    """`once`, `twice`: bits of the positions that are in it, and that are in it again. Equal `uid`: equal weights."""

    uid: int = 0
    step: int = 0
    once: int = 0
    twice: int = 0

    def stepped(self, batches: int, again: int) -> Model:
        """After one optimizer step over these positions."""
        uid = zlib.crc32(f"{self.uid} {batches:x} {again:x}".encode())
        return Model(uid, self.step + 1, self.once | batches, self.twice | again | (self.once & batches))


def bits(partition: int, lo: int, hi: int) -> int:
    """Positions [lo, hi) of a partition."""
    return ((1 << (hi - lo)) - 1) << (partition * SPAN + lo)


def names(model: int) -> str:
    """Positions as a person reads them."""
    found = [f"{at // SPAN}:{at % SPAN}" for at in range(model.bit_length()) if model >> at & 1]
    return " ".join(found[:12]) + (" ..." if len(found) > 12 else "")
