"""A thread that never ends silently: its error is logged once, kept, and raised at its owner's next call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.fork_guard import ForkGuard

OnError = Literal["raise", "warn"]
STOP_S = 5.0
_HINT = "its traceback is in the log; please report it"
_log = logging.getLogger("dlrover_hooks")


def _nothing(*_: object) -> None:
    pass


class BackgroundThread:
    """Runs `run` on a thread, and takes every exception that it raises.

    `run` handles the errors that it expects. Any other one is logged with its traceback (a repeated one only once) and
    becomes a `HooksError` without traceback, whose frames may hold memory that is to be freed. The owner calls `start`,
    `check` within its own methods, and `stop` at its end; all of them on any thread. In a forked child, which does not
    have the thread, `check` and `stop` do nothing.

    Args:
        name: of the thread, for debuggers and stack dumps.
        run: returns soon after `stopping` is set.
        where: the job, rank, node or URL that log and error name.
        kind: the class of errors made from exceptions other than HooksError.
        on_error: "warn": `check` never raises; the line in the log is all.
        again_s: after an error `run` is called again, after this pause in seconds, or at once and for the last time if
            `stop` was called meanwhile. None: the thread ends.
        failed: called on the thread with each error, for example to wake waiting threads.
        wake: called by `stop`, to end a wait of `run` for something other than `stopping`.
        daemon: the interpreter does not wait for this thread when it exits.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        *,
        where: str,
        kind: type[HooksError] = HooksError,
        on_error: OnError = "raise",
        again_s: float | None = None,
        failed: Callable[[HooksError], object] = _nothing,
        wake: Callable[[], object] = _nothing,
        daemon: bool = True,
    ) -> None:
        self.stopping = threading.Event()
        self._run, self._where, self._kind = run, where, kind
        self._on_error, self._again_s, self._failed, self._wake = on_error, again_s, failed, wake
        self._error: HooksError | None = None
        self._logged = ""
        self._here, self._starting = ForkGuard(), threading.Lock()
        self._thread = threading.Thread(target=self._live, name=name, daemon=daemon)

    @property
    def started(self) -> bool:
        """`start` was called, perhaps in the parent process."""
        return self._thread.ident is not None

    @property
    def alive(self) -> bool:
        """The thread runs, in this process."""
        return bool(self._here) and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, if this is the first call. Raises RuntimeError if this process may have no more threads."""
        with self._starting:
            if not self.started:
                self._here = ForkGuard()
                self._thread.start()

    def check(self) -> None:
        """Raise the first error since the last call."""
        if not self._here:
            return
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self, within_s: float = STOP_S) -> bool:
        """Make `run` return and wait for it; False if it has not returned after `within_s` seconds. Idempotent.

        A thread that was not started is not started by it. Called on this very thread, it does not wait.
        """
        if self.started and not self._here:
            return True
        self.stopping.set()
        self._wake()
        return self.join(within_s)

    def join(self, within_s: float) -> bool:
        """Wait for the end of the thread; False if it still runs after `within_s` seconds."""
        if not self.alive:
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(within_s)
        return not self._thread.is_alive()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            last = self.stopping.is_set()
            try:
                self._run()
                return
            except BaseException as raised:  # SystemExit too: threading ignores it
                self._met(raised)
            if last or self._again_s is None:
                return
            self.stopping.wait(self._again_s)

    def _met(self, raised: BaseException) -> None:
        text = f"{self._where}: the thread {self._thread.name} met {type(raised).__name__}: {raised}"
        _log.log(logging.DEBUG if text == self._logged else logging.ERROR, "%s", text, exc_info=raised)
        self._logged = text
        error = raised if isinstance(raised, HooksError) else self._kind(text, hint=_HINT)
        error.__cause__ = error.__context__ = error.__traceback__ = None
        if self._on_error == "raise":
            self._error = self._error or error
        try:
            self._failed(error)
        except Exception:  # the thread goes on, or its error is raised by `check`
            _log.exception("%s: the thread %s could not report its error", self._where, self._thread.name)
