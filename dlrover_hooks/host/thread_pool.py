"""The keeper's worker threads: they keep hashing, pre-faulting and slow storage off its event loop. No torch."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from dlrover_hooks.host.background_thread import BackgroundThread

Job = Callable[[], Any]
Then = Callable[[Any], None]


class ThreadPool:
    """`threads` daemon threads that take jobs in order; they end with the process.

    Use `submit` and `pending` only on the loop's thread. A job's result, or the exception it raised, is passed to
    `then` through `post`, which must run it on the loop's thread.
    """

    def __init__(self, name: str, threads: int, post: Callable[[Callable[[], None]], None]) -> None:
        self.pending = 0
        self._post = post
        self._jobs: queue.SimpleQueue[tuple[Job, Then]] = queue.SimpleQueue()
        for number in range(threads):
            thread = f"keeper-{name}-{number}"
            BackgroundThread(thread, self._work, where="the keeper", on_error="warn", again_s=0.0).start()

    def submit(self, job: Job, then: Then) -> None:
        """Run `job` on a thread, then `then(result or exception)` on the loop."""
        self.pending += 1
        self._jobs.put((job, then))

    def _work(self) -> None:
        while True:
            job, then = self._jobs.get()
            try:
                result: Any = job()
            except Exception as error:  # passed to `then`
                result = error
            self._post(self._outcome(then, result))
            del job, then, result  # they may hold views of a segment that is to be freed

    def _outcome(self, then: Then, result: Any) -> Callable[[], None]:
        def deliver() -> None:
            self.pending -= 1
            then(result)

        return deliver
