"""Decides when a keeper ends. Pure: `now` is in seconds of a monotonic clock. No torch."""

from __future__ import annotations

from collections.abc import Collection

FIRST_S = 30.0
"""Minimum time that a new keeper waits for its first trainer."""


class Lifetime:
    """With a launcher: until `end`. Without: until `linger_s` after the last trainer, or until the job is finished.

    After `end` the emergency flush has `grace_s`.
    """

    def __init__(self, now: float, *, launched: bool, linger_s: float, grace_s: float) -> None:
        self.launched = launched
        """A launcher's pipe decides when the keeper ends."""
        self.grace_s = grace_s
        self._linger_s = linger_s
        self._seen = False
        self._unfinished: set[int] = set()
        self._alone_since: float | None = now
        self._deadline: float | None = None

    @property
    def ending(self) -> bool:
        return self._deadline is not None

    @property
    def finished(self) -> bool:
        """There were trainers, and none of them needs a successor."""
        return self._seen and not self._unfinished

    def came(self, seat: int | None = None) -> None:
        """A trainer connected. `seat`: its local rank, if it saves."""
        self._seen, self._alone_since = True, None
        if seat is not None:
            self._unfinished.add(seat)

    def done(self, seat: int) -> None:
        """The trainer of `seat` needs no successor."""
        self._unfinished.discard(seat)

    def job_done(self, living: Collection[int]) -> None:
        """The job is finished, except for the local ranks `living`."""
        self._unfinished = set(living)

    def alone(self, now: float) -> None:
        """The last trainer disconnected."""
        self._alone_since = now

    def due(self, now: float) -> bool:
        """No more trainers are expected: the keeper has to end."""
        until = self._until()
        return until is not None and (self.finished or now >= until)

    def end(self, now: float) -> None:
        """Start the grace period. Idempotent."""
        if self._deadline is None:
            self._deadline = now + self.grace_s

    def overdue(self, now: float) -> bool:
        """The grace period is over, even if the emergency flush is not."""
        return self._deadline is not None and now >= self._deadline

    def timeout_s(self, now: float) -> float | None:
        """Seconds until `due` or `overdue` may change; None: not without a call."""
        until = self._deadline if self.ending else self._until()
        return None if until is None else max(until - now, 0.0)

    def _until(self) -> float | None:
        if self.ending or self.launched or self._alone_since is None:
            return None
        return self._alone_since + (self._linger_s if self._seen else max(self._linger_s, FIRST_S))
