"""When a node is slow: its speed is an outlier among those of the others, by robust statistics."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

LEAST_RATIO = 2.0
"""A slow node is at least so many times slower than the median. The bound of DLRover's node check (a straggler took
more than twice the median time): nodes of one kind differ by less, also while other programs disturb a measurement."""
LEAST_SCORE = 3.5
"""Outliers have a modified z-score above this: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993)."""
_SIGMAS_PER_MAD = 0.6745
"""The MAD of a normal distribution, in standard deviations (ibid.)."""


class SpeedReference(msgspec.Struct, frozen=True):
    """The median of `count` speeds, and the median of their absolute deviations from it (MAD)."""

    median: float
    deviation: float
    count: int

    def is_slow(self, speed: float | None) -> bool:
        """True if `speed` is both far below the median and far outside of the usual deviations."""
        if speed is None or self.count < 2 or speed * LEAST_RATIO >= self.median:
            return False
        return _SIGMAS_PER_MAD * (self.median - speed) > LEAST_SCORE * self.deviation


def reference_of(speeds: Iterable[float]) -> SpeedReference:
    """The reference for `speeds`: O(n log n).

    Of an even number the upper middle is taken, and the lower one of the deviations: of two nodes the faster one is
    then the reference.
    """
    found = list(speeds)
    if not found:
        return SpeedReference(0.0, 0.0, 0)
    median = statistics.median_high(found)
    deviation = statistics.median_low(abs(one - median) for one in found)
    return SpeedReference(median, deviation, len(found))
