"""Samples of what may never answer: a driver whose device is gone, a network file system whose server is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from dlrover_hooks.host.background_thread import BackgroundThread

log = logging.getLogger("dlrover_hooks")
EVERY_S = 5.0
_STALE = 3
"""A sample counts for so many intervals."""
T = TypeVar("T")
R = TypeVar("R")


class BackgroundSample(Generic[T]):
    """Takes a sample at once and then every `every_s` seconds, in a thread of its own.

    Errors are logged once, as a warning, and never raised. The owner calls `start` and `stop`.

    Args:
        name: of the thread.
        find: called in the thread; returns the function that takes a sample, or None: there is nothing to sample, and
            the thread ends.
        where: the job, rank or node that the warning names.
        what: what is sampled, for the warning.
        every_s: the interval in seconds.
    """

    def __init__(
        self, name: str, find: Callable[[], Callable[[], T | None] | None], *, where: str, what: str,
        every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self._find, self._where, self._what, self._every_s = find, where, what, every_s
        self._last: tuple[T | None, float] = (None, 0.0)
        self._failed = False
        self._thread = BackgroundThread(name, self._run, where=where, on_error="warn")

    @property
    def value(self) -> T | None:
        """The last sample; None without one, and if no newer one was taken for three intervals. Any thread."""
        value, at = self._last
        return value if time.monotonic() - at < _STALE * self._every_s else None

    def start(self) -> None:
        """Start the thread, if it was not started before."""
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """End the thread; one that hangs in a driver is abandoned after `within_s` seconds."""
        self._thread.stop(within_s)

    def _run(self) -> None:
        sample = self._tried(self._find)
        while sample is not None:
            self._last = self._tried(sample), time.monotonic()
            if self._thread.stopping.wait(self._every_s):
                return

    def _tried(self, work: Callable[[], R | None]) -> R | None:
        try:
            return work()
        except Exception as error:
            if not self._failed:
                log.warning("%s: %s cannot be sampled: %s: %s", self._where, self._what, type(error).__name__, error)
            self._failed = True
            return None
