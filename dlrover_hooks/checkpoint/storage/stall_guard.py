"""Calls to a store that may never answer: each has a thread of its own, and is given up once it stands still. No torch.

What is bounded is standstill, not the whole time: a slow upload of any size goes on as long as bytes move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from dlrover_hooks.errors import StorageFailed

STALL_S = 120.0
"""So long a store may take for one piece (at most 8 MiB), or for what moves none: S3 takes a minute and more to put
the parts of a large upload together."""
REPORT_S = 10.0
STUCK = 8
"""So many calls may hang at once; a thread that hangs cannot be ended."""
_T = TypeVar("_T")
_HINT = "the store does not answer: look at the network, or at the mount"


class AttemptAbandoned(Exception):
    """Nobody waits for this attempt any more: it must leave nothing behind, and remove nothing."""


class Attempt:
    """What a call says of itself. Written by its thread, read by the one that waits."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.began = self.moved = time.monotonic()
        self.given_up = False

    def through(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """`pieces` again, counted. Raises GivenUp, behind the last one, too."""
        for piece in pieces:
            self._check()
            yield piece
            self.nbytes += len(piece)
            self.moved = time.monotonic()
        self._check()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    def _check(self) -> None:
        if self.given_up:
            raise AttemptAbandoned


class Patience:
    """Runs calls, and gives up those that stand still for `stall_s`. Any thread may call `run`."""

    def __init__(self, stall_s: float = STALL_S, report_s: float = REPORT_S) -> None:
        self._stall_s, self._report_s = stall_s, report_s
        self._stuck: list[threading.Thread] = []

    def run(self, work: Callable[[Attempt], _T], what: str, report: Callable[[Attempt], None] = lambda _: None) -> _T:
        """`work(attempt)` on a thread of its own; `report` is called on this one every `report_s`.

        Raises:
            StorageFailed: it stood still, or too many before it still do.
            Exception: whatever `work` raised.
        """
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= STUCK:
            raise StorageFailed(f"cannot {what}: {STUCK} calls before it still hang", hint=_HINT)
        attempt, done, outcome = Attempt(), threading.Event(), list[Any]()

        def call() -> None:
            try:
                outcome[:] = [work(attempt), None]
            except BaseException as error:  # handed over, not swallowed
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
