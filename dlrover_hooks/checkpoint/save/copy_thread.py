"""One copy at a time beside the step, on a thread of its own. No torch."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.host.fork_guard import ForkGuard

WAIT_S, COPY_BYTES_PER_S = 10.0, 500e6
"""An optimizer waits so long for a copy, and a second more for each 500 MB. Measured: one thread copies 10 GB/s, and
1.3 GB/s into memory that was never touched. A copy that takes longer is swapped out, stopped or broken: that save is
lost, and training goes on."""
FREE_S = 600.0
"""Memory that is read by such a copy is not given back for so long: the process would die of it."""
_log = logging.getLogger("dlrover_hooks")


class Aside:
    """Owns the thread `dlrover-hooks-copy`, from the first job on. `begin` and `close` on the training thread.

    A forked child has no such thread, and its weights are not those that are copied: it waits for nothing.
    """

    def __init__(self) -> None:
        self.here = ForkGuard()
        self.waited_s = 0.0
        """How long `wait` held up its callers, since this was set to 0."""
        self.given_up = False
        """The deadline of the copy that is under way has passed: nothing waits for it, and it must not count."""
        self._within_s = WAIT_S
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.idle = self._idle.is_set
        """Nothing is being copied."""
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], None], nbytes: int) -> None:
        """Run `job`, which copies `nbytes` at most and stores its own errors, once the one before is over.

        Raises:
            CheckpointError: see `check`.
        """
        self.wait()
        self.check()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dlrover-hooks-copy", daemon=True)
            thread.start()
            self._thread = thread
        self._within_s = WAIT_S + nbytes / COPY_BYTES_PER_S
        self._idle.clear()
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when nothing is being copied, or what is was given up. Any thread but the job's own."""
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
        """Return when nothing is being copied, not even what was given up. At most `FREE_S`."""
        self.wait()
        if self.here:
            self._idle.wait(FREE_S)

    def check(self) -> None:
        """After `wait`: may memory be written, or unmapped? A copy that was given up still has a slot.

        Raises:
            CheckpointError: it has not ended yet.
        """
        if self.here and not self._idle.is_set():
            raise CheckpointError(
                "a copy into memory that was given up has not ended yet",
                hint="is this machine swapping? Saves go on once it ends",
            )
        self.given_up = False

    def close(self) -> None:
        """Wait, and end the thread; one that hangs ends behind its copy. Idempotent."""
        self.wait()
        if self.here and self._thread is not None:
            self._jobs.put(None)
            if not self.given_up:
                self._thread.join(WAIT_S)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # it holds a view of a slot
                self._idle.set()
