"""Whether a save is made at once (eager) or overlapped with the next forward and backward (lazy). Pure.

`auto` begins eager and measures how long a step with a save takes, not how long the save blocks. With an idle core lazy
costs a hundredth of the copy; with all cores busy it gains nothing (measured). So the better choice has to be measured.
"""

from __future__ import annotations

import math
import statistics

EAGER, LAZY, AUTO = "eager", "lazy", "auto"
WARM_UP = 3
"""Saves that are not counted: the first ones write to memory that was never touched."""
PAIRS, MOST_PAIRS = 20, 60
"""A trial ends at the first clear answer after PAIRS; without one after MOST_PAIRS the choice stays."""
RETRY = 1000
"""Number of saves after which a choice is tested again: clusters and batch sizes change."""
MARGIN = 0.01
"""The share of a step that must be gained to change an earlier choice (hysteresis)."""
_SURE = 0.95


class Mode:
    """The choice of one rank. `chosen` applies between trials."""

    def __init__(self, wanted: str = AUTO) -> None:
        self.wanted, self.chosen = wanted, LAZY if wanted == LAZY else EAGER
        self._forbidden = ""
        self._tried, self._settled = wanted != AUTO, False
        self._saves = -WARM_UP
        self._pairs: list[tuple[float, float]] = []
        self._half: tuple[str, float] | None = None
        self._last = EAGER

    @property
    def trying(self) -> bool:
        """Both ways are being compared."""
        return not self._tried and self._saves >= 0

    def next(self) -> str:
        """How the next save is made. Trials alternate eager, lazy, lazy, eager: so a drift affects both equally."""
        self._last = (EAGER, LAZY, LAZY, EAGER)[self._saves % 4] if self.trying else self.chosen
        if self._forbidden:
            self._last = EAGER
        self._saves += 1
        if self._tried and self.wanted == AUTO and self._saves >= RETRY and not self._forbidden:
            self._tried, self._saves = False, 0
        return self._last

    def took(self, seconds: float) -> str | None:
        """The step with the last save took `seconds`. Returns a line to log if that decided the trial."""
        if not self.trying or self._forbidden:
            return None
        if self._half is None or self._half[0] == self._last:
            self._half = (self._last, seconds)
            return None
        times = dict([self._half, (self._last, seconds)])
        self._half = None
        self._pairs.append((times[EAGER], times[LAZY]))
        return self._settle() if len(self._pairs) >= PAIRS else None

    def forbid(self, reason: str) -> str | None:
        """Disable lazy saves, because they would be wrong here. Returns a line to log, the first time."""
        if self._forbidden:
            return None
        self._forbidden, self.chosen = reason, EAGER
        return f"saves are eager from here on: {reason}"

    def _settle(self) -> str | None:
        gains = sorted(eager - lazy for eager, lazy in self._pairs)
        low, high = _bounds(gains)
        step_s = statistics.median(eager for eager, _ in self._pairs)
        margin = MARGIN * step_s if self._settled else 0.0
        if self.chosen == EAGER:
            other, change, stay = LAZY, low > margin, high <= margin
        else:
            other, change, stay = EAGER, high < -margin, low >= -margin
        if not change and not stay and len(self._pairs) < MOST_PAIRS:
            return None
        return self._end(other if change else self.chosen, statistics.median(gains), step_s)

    def _end(self, chosen: str, gain_s: float, step_s: float) -> str:
        pairs = len(self._pairs)
        self.chosen, self._tried, self._settled, self._saves, self._pairs = chosen, True, True, 0, []
        chosen_s, other_s = (step_s - gain_s, step_s) if chosen == LAZY else (step_s, step_s - gain_s)
        word = "and" if chosen_s < other_s else "which is not clearly longer than"
        other = EAGER if chosen == LAZY else LAZY
        return (
            f"saves are {chosen}: a step with such a save took {1e3 * chosen_s:.2f} ms, {word} {1e3 * other_s:.2f} ms "
            f"with {'an' if other == EAGER else 'a'} {other} one (median of {pairs} pairs)"
        )


def _bounds(values: list[float]) -> tuple[float, float]:
    """One-sided 95 % bounds of the median of sorted `values`, from the binomial distribution of ranks (sign test)."""
    count, below, rank = len(values), 0.0, 0
    while below < _SURE:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return values[count - rank], values[rank - 1]
