"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Timeline:
    """`now`: seconds since the begin. What is added for the same time happens in the order in which it was added."""

    def __init__(self) -> None:
        self.now, self.happened = 0.0, 0
        self._heap = list[tuple[float, int, Callable[[], object]]]()
        self._numbers = itertools.count()

    def clock(self) -> float:
        """`now`."""
        return self.now

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have it happen at `when`, or now if that is over."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Have it happen so much later."""
        self.at(self.now + seconds, what)

    @property
    def next_at(self) -> float:
        """When the next thing happens; infinity: nothing will."""
        return self._heap[0][0] if self._heap else math.inf

    def step(self, until: float) -> bool:
        """The next thing happens. False: there is none before `until`, which is now."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, what = heapq.heappop(self._heap)
        self.happened += 1
        what()
        return True
