"""Which keys are to be worked on, and when. Pure: `now` is given, in seconds."""

from __future__ import annotations

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
        self._working: set[K] = set()
        self._failures: dict[K, int] = {}

    def add(self, key: K, at: float) -> None:
        """The key has changed: work on it at this time, or before."""
        self._due[key] = min(at, self._due.get(key, math.inf))

    def take(self, now: float) -> K | None:
        """The key to work on now that has waited longest. `done` or `failed` follows."""
        due = [(at, number, key) for number, (key, at) in enumerate(self._due.items()) if self._free(key, at, now)]
        if not due:
            return None
        key = min(due, key=lambda one: one[:2])[2]
        del self._due[key]
        self._working.add(key)
        return key

    def done(self, key: K, now: float, *, known: bool = True) -> None:
        """It is as it should be. `known` False: there is no such object any more, so it is forgotten."""
        self._working.discard(key)
        self._failures.pop(key, None)
        if known:
            self._due[key] = min(now + self._resync_s, self._due.get(key, math.inf))

    def failed(self, key: K, now: float) -> None:
        """Work on it again after a pause."""
        self._working.discard(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._due[key] = now + self._retries.pause_s(failures)

    def due(self) -> float:
        """When `take` may have something; infinity: never."""
        return min((at for key, at in self._due.items() if key not in self._working), default=math.inf)

    def _free(self, key: K, at: float, now: float) -> bool:
        return at <= now and key not in self._working
