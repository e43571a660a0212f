"""Runs one copy at a time on a separate thread, overlapped with the step. No torch."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.fork_guard import ForkGuard

WAIT_S, COPY_BYTES_PER_S = 10.0, 500e6
"""An optimizer waits this long for a copy, plus a second for each 500 MB. Measured: one thread copies 10 GB/s, and
1.3 GB/s into memory that was never touched. A copy that takes longer is swapped out, stopped or broken: that save is
lost, and training continues."""
FREE_S = 600.0
"""Memory that such a copy reads is not freed for this long: freeing it would crash the process."""
_log = logging.getLogger("dlrover_hooks")


class CopyThread:
    """Owns the thread `dlrover-hooks-copy`, from the first job on. `begin` and `close` run on the training thread.

    A forked child has no such thread, and its weights are not those being copied: there, nothing waits.
    """

    def __init__(self) -> None:
        self.here = ForkGuard()
        self.waited_s = 0.0
        """Total time for which `wait` blocked its callers, since this was set to 0."""
        self.given_up = False
        """The deadline of the copy in progress has passed: nothing waits for it, and it must not be published."""
        self._within_s = WAIT_S
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.idle = self._idle.is_set
        """Nothing is being copied."""
        self._thread: BackgroundThread | None = None

    def begin(self, job: Callable[[], None], nbytes: int) -> None:
        """Run `job` after the previous one. It copies at most `nbytes` and stores its own errors.

        Raises:
            CheckpointError: see `check`; also if an earlier job raised an error of its own.
        """
        self.wait()
        self.check()
        if self._thread is None:
            thread = BackgroundThread(
                "dlrover-hooks-copy",
                self._run,
                where="a copy into memory during a step",
                kind=CheckpointError,
                again_s=0.0,  # the jobs after it are copied
                wake=lambda: self._jobs.put(None),
            )
            thread.start()
            self._thread = thread
        self._thread.check()
        self._within_s = WAIT_S + nbytes / COPY_BYTES_PER_S
        self._idle.clear()
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when no copy is in progress, or the one in progress was abandoned. Any thread but the job's own."""
        if self._idle.is_set() or self.given_up or not self.here:
            return
        began = time.perf_counter()
        done = self._idle.wait(self._within_s)
        self.waited_s += time.perf_counter() - began
        if not done:
            self.given_up = True
            _log.warning(
                "a copy into memory has not ended within %.3g s: that save is given up, and no other is made until it "
                "ends. HINT: is this machine swapping? Give it memory", self._within_s,
            )  # fmt: skip

    def drain(self) -> None:
        """Return when no copy is in progress, not even an abandoned one. Waits at most `FREE_S`."""
        self.wait()
        if self.here:
            self._idle.wait(FREE_S)

    def check(self) -> None:
        """Call it after `wait`: returns if memory may be written or unmapped. An abandoned copy still uses a slot.

        Raises:
            CheckpointError: an abandoned copy has not ended yet.
        """
        if self.here and not self._idle.is_set():
            raise CheckpointError(
                "a copy into memory that was given up has not ended yet",
                hint="is this machine swapping? Saves go on once it ends",
            )
        self.given_up = False

    def close(self) -> None:
        """Wait, and end the thread; if its copy hangs, it ends after that copy. Idempotent."""
        self.wait()
        if self.here and self._thread is not None:
            self._thread.stop(0.0 if self.given_up else WAIT_S)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # it holds a view of a slot
                self._idle.set()
