"""Works on keys, such as jobs, whenever something of theirs changes and from time to time, on several threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.kubernetes.work_queue import WorkQueue

K = TypeVar("K", bound=Hashable)
log = logging.getLogger("dlrover_hooks.operator")
_AGAIN_S = 1.0
_LONGEST_WAIT_S = 60.0


class ReconcileLoop(Generic[K]):
    """Level-triggered: `reconcile` compares what is to be with what there is, so it does not matter which changes were
    seen.

    Args:
        reconcile: does what is to be done about a key. Returns False if there is no such object any more. Called on the
            threads of the loop, for each key on one at a time. After `KubernetesFailed` or an invalid object
            (`msgspec.ValidationError`) it is called again after a pause; every other error is one of the program.
        name: of the threads, and of the keys in the log, such as "job".
        workers: so many keys are worked on at the same time.
        resync_s: each key is worked on again after so long, without a change.
        clock: seconds.
    """

    def __init__(
        self, reconcile: Callable[[K], bool], name: str, *, workers: int, resync_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._reconcile, self._name, self._clock = reconcile, name, clock
        self._changed, self._queue, self._over = threading.Condition(), WorkQueue[K](resync_s), False
        self._threads = [
            BackgroundThread(f"dlrover-hooks-{name}-{number}", self._run, where=name, again_s=_AGAIN_S)
            for number in range(workers)
        ]

    def add(self, key: K, at: float = 0.0) -> None:
        """Work on this key now, or at this time of the clock. Any thread."""
        with self._changed:
            self._queue.add(key, max(at, self._clock()))
            self._changed.notify_all()

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what a thread met since the last call."""
        for thread in self._threads:
            thread.check()

    def stop(self) -> None:
        """End the threads, each after the key that it works on. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.stop()

    def work(self) -> float:
        """Without `start`: work on this thread on all keys that are due. Returns when the next one is."""
        while True:
            with self._changed:
                if (key := self._queue.take(self._clock())) is None:
                    return self._queue.due()
            self._work_on(key)

    def _run(self) -> None:
        while (key := self._next()) is not None:
            self._work_on(key)

    def _work_on(self, key: K) -> None:
        known, failed = True, True
        try:
            known = self._reconcile(key)
            failed = False
        except (KubernetesFailed, msgspec.ValidationError) as error:
            log.warning("%s %s: %s Trying again.", self._name, key, error)
        finally:
            with self._changed:
                if failed:
                    self._queue.failed(key, self._clock())
                else:
                    self._queue.done(key, self._clock(), known=known)
                self._changed.notify_all()

    def _next(self) -> K | None:
        """The next key; None: the loop is stopped."""
        with self._changed:
            while not self._over:
                now = self._clock()
                if (key := self._queue.take(now)) is not None:
                    return key
                self._changed.wait(min(max(0.0, self._queue.due() - now), _LONGEST_WAIT_S))
        return None
