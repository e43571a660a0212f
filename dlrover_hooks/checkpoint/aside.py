"""One copy at a time beside the step, on a thread of its own. No torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.forks import Here

WAIT_S = 600.0
"""Deadline for a copy: memory that is this slow is swapped out or broken."""


class Aside:
    """Owns the thread `dlrover-hooks-copy`, from the first job on. `begin` and `close` on the training thread.

    A forked child has no such thread, and its weights are not those that are copied: it waits for nothing.
    """

    def __init__(self) -> None:
        self.here = Here()
        self.waited_s = 0.0
        """How long `wait` held up its callers, since this was set to 0."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Run `job`, which stores its own errors, once the one before is over."""
        self.wait()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dlrover-hooks-copy", daemon=True)
            thread.start()
            self._thread = thread
        self._idle.clear()
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when nothing is being copied. Any thread but the job's own.

        Raises:
            CheckpointError: the copy does not end; weights must not change under it.
        """
        if self._idle.is_set() or not self.here:
            return
        began = time.perf_counter()
        done = self._idle.wait(WAIT_S)
        self.waited_s += time.perf_counter() - began
        if not done:
            raise CheckpointError(
                f"a copy into memory has not ended within {WAIT_S:g} s", hint="is this machine swapping? Give it memory"
            )

    def close(self) -> None:
        """Wait, and end the thread. Idempotent."""
        self.wait()
        if self.here and self._thread is not None:
            self._jobs.put(None)
            self._thread.join(WAIT_S)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # it holds a view of a slot
                self._idle.set()
