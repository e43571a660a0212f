"""Detects a rank that makes no more steps, although its process is alive and sends heartbeats. Pure."""

from __future__ import annotations

import math

FLOOR_S = 60.0
"""A learned limit is never shorter: a pause of less than a minute is common (evaluation, a checkpoint, a slow disk)."""
FACTOR = 5.0
"""A learned limit is this multiple of the longest pause seen; NVRx uses the same safety factor for learned timeouts."""
LEARN_STEPS = 3
"""Steps after the first one before there is a learned limit."""
LONGEST_LOOK_S = 5.0
"""Most seconds that count between two looks: this process, or the thread that looks, may have been stopped itself."""


BUSY_FACTOR = 10.0
"""A process that is active may take this multiple of a learned limit: ten minutes at least, as NCCL's own timeout."""
ACTIVE_S = 10.0
"""A process counts as active for so long after a look at which it was."""


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
        self._active_ago_s = math.inf
        self._looked_at: float | None = None

    def look(self, step: int, now: float, *, active: bool = False) -> bool:
        """Whether the rank stalls.

        Args:
            step: the number of its last step.
            now: monotonic seconds.
            active: its process has done something since the last look, see `ProcessActivity`.
        """
        since_s = min(now - self._looked_at, LONGEST_LOOK_S) if self._looked_at is not None else 0.0
        self.idle_s += since_s
        self._active_ago_s = 0.0 if active else self._active_ago_s + since_s
        self._looked_at = now
        if step > self._step:
            if self._steps:  # the first pause ends with the first step
                self.longest_s = max(self.longest_s, self.idle_s)
            self._steps += 1
            self._step, self.idle_s = step, 0.0
        return self.idle_s > self.limit_s

    @property
    def busy(self) -> bool:
        """It stalls, but does something, such as an evaluation longer than all pauses before: restart nothing yet.

        Never true for a limit that the user has set.
        """
        learned = self._limit_s is None and self.idle_s <= BUSY_FACTOR * self.limit_s
        return learned and self._active_ago_s < ACTIVE_S

    @property
    def limit_s(self) -> float:
        """Seconds without a step that count as a stall now."""
        if not self._steps:
            return math.inf
        if self._limit_s is not None:
            return self._limit_s
        return max(FLOOR_S, FACTOR * self.longest_s) if self._steps > LEARN_STEPS else math.inf
