"""Rates of counters that only grow."""

from __future__ import annotations


class CounterRate:
    """The mean increase per second between two readings of a counter."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def per_s(self, value: float, now: float) -> float:
        """The rate since the last call; 0 at the first one, and after the counter was reset."""
        last, self._last = self._last, (value, now)
        if last is None or now <= last[1]:
            return 0.0
        return max(0.0, value - last[0]) / (now - last[1])
