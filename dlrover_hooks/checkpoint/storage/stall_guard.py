"""Calls to a store that may never answer. Each runs on its own thread and is abandoned once it stalls. No torch.

The timeout applies to stalls, not to the total time: a slow upload of any size continues as long as bytes move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from dlrover_hooks.errors import StorageFailed

STALL_S = 120.0
"""Timeout for one piece (at most 8 MiB), or for a call that moves no bytes: S3 takes a minute and more to assemble
the parts of a large upload."""
REPORT_S = 10.0
STUCK = 8
"""At most this many calls may hang at once; a thread that hangs cannot be ended."""
_T = TypeVar("_T")
_HINT = "the store does not answer: look at the network, or at the mount"


class AttemptAbandoned(Exception):
    """The result of this attempt is no longer awaited: it must leave nothing behind, and remove nothing."""


class Attempt:
    """The progress of a call. Written by its thread, read by the waiting one."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.began = self.moved = time.monotonic()
        self.given_up = False

    def through(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield `pieces`, counted. Raises AttemptAbandoned, also after the last one."""
        for piece in pieces:
            self._check()
            yield piece
            self.nbytes += len(piece)
            self.moved = time.monotonic()
        self._check()

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def _check(self) -> None:
        if self.given_up:
            raise AttemptAbandoned


class StallGuard:
    """Runs calls, and abandons those that stall for `stall_s`. Any thread may call `run`."""

    def __init__(self, stall_s: float = STALL_S, report_s: float = REPORT_S) -> None:
        self._stall_s, self._report_s = stall_s, report_s
        self._stuck: list[threading.Thread] = []

    def run(self, work: Callable[[Attempt], _T], what: str, report: Callable[[Attempt], None] = lambda _: None) -> _T:
        """Run `work(attempt)` on a new thread. `report` is called on the calling thread every `report_s`.

        Raises:
            StorageFailed: it stalled, or too many earlier calls still hang.
            Exception: raised by `work`.
        """
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= STUCK:
            raise StorageFailed(f"cannot {what}: {STUCK} calls before it still hang", hint=_HINT)
        attempt, done, outcome = Attempt(), threading.Event(), list[Any]()

        def call() -> None:
            try:
                outcome[:] = [work(attempt), None]
            except BaseException as error:  # raised by `run` on the calling thread
                outcome[:] = [None, error]
            done.set()

        thread = threading.Thread(target=call, name="dlrover-hooks-store", daemon=True)
        thread.start()
        reports = 1
        while not done.wait(self._pause_s(attempt, reports)):
            if attempt.seconds >= reports * self._report_s:
                reports += 1
                report(attempt)
            if time.monotonic() >= attempt.moved + self._stall_s:
                attempt.given_up = True
                self._stuck.append(thread)
                raise StorageFailed(f"cannot {what}: nothing moved for {self._stall_s:g} s", hint=_HINT)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _pause_s(self, attempt: Attempt, reports: int) -> float:
        now = time.monotonic()
        return max(min(attempt.moved + self._stall_s, attempt.began + reports * self._report_s) - now, 0.0)
