"""Writes requested by the user, overlapped with the training steps: done on one thread, in the requested order.

At most one save is being written while one more waits; the caller of a third waits until the first is done. So memory
is bounded: a slow storage slows down the steps, but does not fill the memory. Errors are kept and raised by the next
method call. Jobs that are left when the interpreter ends are done then, within the deadline. A forked child does none:
its parent does them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dlrover_hooks.checkpoint.storage.atomic_files import FULL
from dlrover_hooks.checkpoint.storage.filesystem import reason
from dlrover_hooks.errors import CheckpointError, HooksError, StorageFailed
from dlrover_hooks.host.background_thread import BackgroundThread

log = logging.getLogger("dlrover_hooks")
SAVES = 2
"""One being written, one waiting."""


class _Job(NamedTuple):
    path: str
    leaves: bool
    """Whether `path` exists afterwards."""
    act: Callable[[], object]
    save: bool


class BackgroundSaves:
    """Jobs of one process. The thread lives from the first job to `close`, or to the interpreter's end.

    All methods run on the training thread. `check`, `room`, `wait` and `close` raise StorageFailed for a job that
    failed since the last call (with `on_error` "warn" it is only logged), and CheckpointError after a wait of
    `deadline_s`.
    """

    def __init__(self, *, on_error: str = "raise", deadline_s: float = 600.0) -> None:
        self._on_error, self._deadline_s = on_error, deadline_s
        self._said = False
        self._renew()
        _alive.add(self)

    def _renew(self) -> None:
        """Also called in a forked child, which must not use thread, lock and jobs of its parent."""
        self._jobs: deque[_Job] = deque()
        """The first one is in progress."""
        self._failed: list[HooksError] = []
        self._changed = threading.Condition()
        self._thread: BackgroundThread | None = None
        self._closing = False

    def room(self) -> None:
        """Wait until one more save may be added. Call it before copying the state of that save."""
        with self._changed:
            if self._saves() >= SAVES and not self._said:
                self._said = True
                log.warning("saving to %s waits for the save before the last: the storage is slower than the saves",
                            self._jobs[0].path)  # fmt: skip
            self._wait(lambda: self._saves() < SAVES)
        self.check()

    def save(self, path: str, act: Callable[[], object]) -> None:
        """`act()` will write `path`."""
        self._add(_Job(path, True, act, True))

    def add(self, path: str, act: Callable[[], object]) -> None:
        """`act()` will create `path`, at little cost."""
        self._add(_Job(path, True, act, False))

    def remove(self, path: str, act: Callable[[], object]) -> None:
        """`act()` will remove `path`, after all jobs added before."""
        self._add(_Job(path, False, act, False))

    def leaves(self, path: str) -> bool | None:
        """Whether `path` will exist when all jobs are done; None if no job concerns it."""
        with self._changed:
            return next((job.leaves for job in reversed(self._jobs) if job.path == path), None)

    def check(self) -> None:
        """Raise the first error since the last call."""
        with self._changed:
            failed, self._failed = self._failed, []
        for other in failed[1:]:
            log.error("%s", other)
        if failed:
            raise failed[0]

    def wait(self, path: str | None = None) -> None:
        """Wait until all jobs are done, or all that concern `path`."""
        with self._changed:
            self._wait(lambda: not any(path in (None, job.path) for job in self._jobs))
        self.check()

    def close(self) -> None:
        """Finish all jobs and end the thread. A job added later starts a new one."""
        try:
            with self._changed:
                self._wait(lambda: not self._jobs)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
        self.check()

    def _saves(self) -> int:
        return sum(job.save for job in self._jobs)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Call it with the lock held."""
        if not self._changed.wait_for(done, self._deadline_s):
            raise CheckpointError(
                f"{self._jobs[0].path} is still not written after {self._deadline_s:g} s",
                hint="look at the storage; nothing half-written is visible under that name",
            )

    def _add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._closing = False
            if self._thread is None:
                self._thread = BackgroundThread(
                    "dlrover-hooks-behind", self._run, where="saving in the background", again_s=0.0, failed=self._met
                )
                self._thread.start()
                atexit.register(self._exit)
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            began, failed = time.monotonic(), _done(job)
            del job  # it refers to the copy
            with self._changed:
                path = self._jobs.popleft().path
                log.debug("%s: %.3f s in the background", path, time.monotonic() - began)
                if failed is not None and self._on_error == "warn":
                    log.warning("%s", failed)
                elif failed is not None:
                    self._failed.append(failed)
                self._changed.notify_all()

    def _met(self, error: HooksError) -> None:
        with self._changed:
            if self._on_error != "warn":
                self._failed.append(error)
            self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if self._jobs:
                return self._jobs[0]
            self._thread = None
            atexit.unregister(self._exit)
            return None

    def _exit(self) -> None:
        try:
            self.close()
        except HooksError as error:  # the interpreter ends: there is no caller to raise it to
            log.error("%s", error)


_alive: weakref.WeakSet[BackgroundSaves] = weakref.WeakSet()


def _renew_in_child() -> None:
    for behind in list(_alive):
        behind._renew()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_renew_in_child)


def _done(job: _Job) -> HooksError | None:
    """The error of `job`, if any, without traceback: its frames would refer to the copy."""
    try:
        job.act()
    except HooksError as error:
        return error.with_traceback(None)
    except BaseException as error:
        doing = "write" if job.leaves else "remove"
        full = isinstance(error, OSError) and error.errno in FULL
        return StorageFailed(
            f"cannot {doing} {job.path}: {reason(error)}",
            hint=("free some space there, or save fewer; " if full else "")
            + "the training went on; what stood there before still does",
        )
    return None
