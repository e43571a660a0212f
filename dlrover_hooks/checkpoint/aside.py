"""One copy at a time beside the step, on a thread of its own. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dlrover_hooks.errors import CheckpointError

WAIT_S = 600.0
"""Deadline for a copy: memory that is this slow is swapped out or broken."""


class Aside:
    """Owns the thread `dlrover-hooks-copy`, a new one for each job. `begin` on the training thread."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """How long `wait` held up its callers, since this was set to 0."""
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Run `job`, which stores its own errors, once the one before is over."""
        self.wait()
        self._thread = threading.Thread(target=job, name="dlrover-hooks-copy", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being copied. Any thread but the job's own.

        Raises:
            CheckpointError: the copy does not end; weights must not change under it.
        """
        thread = self._thread
        if thread is None:
            return
        began = time.perf_counter()
        thread.join(WAIT_S)
        self.waited_s += time.perf_counter() - began
        if thread.is_alive():
            raise CheckpointError(
                f"a copy into memory has not ended within {WAIT_S:g} s", hint="is this machine swapping? Give it memory"
            )
        self._thread = None
