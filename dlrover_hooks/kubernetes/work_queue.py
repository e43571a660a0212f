"""Which keys are to be worked on, and when. Pure: `now` is given, in seconds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)


class WorkRetries(msgspec.Struct, frozen=True):
    """A key whose work failed is worked on again after `first_s`, then after twice as long, up to `longest_s`."""

    first_s: float = 0.1
    longest_s: float = 30.0

    def pause_s(self, failures: int) -> float:
        """After so many failures in a row."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60))


class WorkQueue(Generic[K]):
    """Each key is worked on by one thread at a time; what changes meanwhile is worked on after that.

    Not thread-safe: one lock owns it. `resync_s`: each key is worked on again after so long, without a change.
    """

    def __init__(self, resync_s: float, retries: WorkRetries | None = None) -> None:
        self._resync_s, self._retries = resync_s, retries or WorkRetries()
        self._due: dict[K, float] = {}
        self._heap = list[tuple[float, int, K]]()
        """The times of `_due`, and older ones, which do not count any more; without keys that are worked on."""
        self._numbers = itertools.count()
        self._working: set[K] = set()
        self._failures: dict[K, int] = {}

    def add(self, key: K, at: float) -> None:
        """The key has changed: work on it at this time, or before."""
        if at < self._due.get(key, math.inf):
            self._set(key, at)

    def take(self, now: float) -> K | None:
        """The key to work on now that has waited longest. `done` or `failed` follows."""
        if self.due() > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._working.add(key)
        return key

    def done(self, key: K, now: float, *, known: bool = True) -> None:
        """It is as it should be. `known` False: there is no such object any more, so it is forgotten."""
        self._working.discard(key)
        self._failures.pop(key, None)
        at = self._due.get(key, math.inf)
        if known:
            at = min(now + self._resync_s, at)
        if at < math.inf:
            self._set(key, at)

    def failed(self, key: K, now: float) -> None:
        """Work on it again after a pause."""
        self._working.discard(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._set(key, now + self._retries.pause_s(failures))

    def due(self) -> float:
        """When `take` may have something; infinity: never."""
        while self._heap:
            at, _, key = self._heap[0]
            if key not in self._working and self._due.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return math.inf

    def _set(self, key: K, at: float) -> None:
        self._due[key] = at
        if key not in self._working:
            heapq.heappush(self._heap, (at, next(self._numbers), key))
