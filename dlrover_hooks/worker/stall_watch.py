"""Detects a rank that makes no more steps, although its process is alive and sends heartbeats. Pure."""

from __future__ import annotations

FLOOR_S = 60.0
"""A learned limit is never shorter: a pause of less than a minute is common (evaluation, a checkpoint, a slow disk)."""
FACTOR = 5.0
"""A learned limit is this multiple of the longest pause seen; NVRx uses the same safety factor for learned timeouts."""
LEARN_STEPS = 3
"""Steps after the first one before there is a learned limit."""
LONGEST_LOOK_S = 5.0
"""Most seconds that count between two looks: this process, or the thread that looks, may have been stopped itself."""


class StallWatch:
    """Owned by one thread, which calls `look` about once a second.

    Nothing is reported before the first step that it sees: imports, compilation and the first batch take any time.

    Args:
        limit_s: seconds without a step that count as a stall; None: learned from the pauses between the steps,
            infinity: none ever does.
        begin: the step from which training begins; until a greater one is seen, there was no step.
    """

    def __init__(self, limit_s: float | None = None, begin: int = 0) -> None:
        self.longest_s = 0.0
        """The longest pause between two steps so far, without the one before the first step."""
        self.idle_s = 0.0
        """Seconds since the last step."""
        self._limit_s, self._step, self._steps = limit_s, begin, 0
        self._looked_at: float | None = None

    def look(self, step: int, now: float) -> bool:
        """Whether the rank stalls. `step`: the number of its last step; `now`: monotonic seconds."""
        self.idle_s += min(now - self._looked_at, LONGEST_LOOK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        if step > self._step:
            if self._steps:  # the first pause ends with the first step
                self.longest_s = max(self.longest_s, self.idle_s)
            self._steps += 1
            self._step, self.idle_s = step, 0.0
        return self.idle_s > self.limit_s

    @property
    def limit_s(self) -> float:
        """Seconds without a step that count as a stall now."""
        if not self._steps:
            return float("inf")
        if self._limit_s is not None:
            return self._limit_s
        return max(FLOOR_S, FACTOR * self.longest_s) if self._steps > LEARN_STEPS else float("inf")
