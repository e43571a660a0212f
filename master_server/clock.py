"""The clocks of a master: the machine's, and the time in which the master was able to work."""

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
    """Seconds in which this master could hear its workers and answer them. All leases and waits are measured by it.

    A worker cannot renew a lease while the master's process is stopped, or while a commit of the journal does not end:
    of such a pause only `most_s` count. The owner calls `seconds` at least every `tick_s`, so that a longer time
    between two calls means that the process was stopped.
    """

    def __init__(self, monotonic: Callable[[], float], most_s: float) -> None:
        self._monotonic, self.most_s = monotonic, most_s
        self.tick_s = most_s / 2
        self._seconds, self._seen = 0.0, monotonic()
        self._commit_began = math.inf
        self._missed_s = 0.0

    def seconds(self) -> float:
        """Since the beginning; never goes back."""
        at = self._monotonic()
        last = min(self._seen + self.most_s, max(self._seen, self._commit_began + self.most_s))
        counted = min(at, last) - self._seen
        self._missed_s += at - self._seen - counted
        self._seconds += counted
        self._seen = at
        return self._seconds

    def missed_s(self) -> float:
        """Seconds that passed and were not counted, since this was asked last."""
        missed, self._missed_s = self._missed_s, 0.0
        return missed

    def commit_begins(self) -> None:
        """From now on replies wait for the journal."""
        self.seconds()
        self._commit_began = self._seen

    def commit_ended(self) -> None:
        """They do not any more."""
        self.seconds()
        self._commit_began = math.inf
