"""The clocks of a master: the machine's clocks, and the time during which the master was able to work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """The clocks of a master's machine, in seconds. `wall` counts from the epoch and may be set back."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


REAL = Clock()


class Uptime:
    """Seconds during which this master could process requests. All leases and waits are measured by it.

    A worker cannot renew a lease while the master's process is stopped, or while a commit of the journal blocks: at
    most `most_s` of such a pause count. The owner calls `seconds` at least every `tick_s`, so a longer time between
    two calls means that the process was stopped.
    """

    def __init__(self, monotonic: Callable[[], float], most_s: float) -> None:
        self._monotonic, self.most_s = monotonic, most_s
        self.tick_s = most_s / 2
        self._seconds, self._seen = 0.0, monotonic()
        self._commit_began = math.inf
        self._missed_s = 0.0

    def seconds(self) -> float:
        """Seconds counted since the start; never decreases."""
        at, seen = self._monotonic(), self._seen
        if at > min(seen, self._commit_began) + self.most_s:
            last = min(seen + self.most_s, max(seen, self._commit_began + self.most_s))
            self._missed_s += at - last
            at, self._seen = last, at
        else:  # several times in each request
            self._seen = at
        self._seconds += at - seen
        return self._seconds

    def missed_s(self) -> float:
        """Seconds that passed without being counted, since the previous call."""
        missed, self._missed_s = self._missed_s, 0.0
        return missed

    def commit_begins(self) -> None:
        """A journal commit begins; replies wait for it."""
        self.seconds()
        self._commit_began = self._seen

    def commit_ended(self) -> None:
        """The journal commit has ended."""
        self.seconds()
        self._commit_began = math.inf
