"""A worker's report of the exception that ended it, through an inherited pipe. Its stderr is not used."""

from __future__ import annotations

import contextlib
import os
import select
import time

import msgspec

from dlrover_hooks.config import STACK_SIGNAL, last_words_to
from dlrover_hooks.host.child_process import Child

_STACKS_S = 2.0
_QUIET_S = 0.2
"""Within this time after the last bytes of the stacks, more would have come."""


class WorkerError(msgspec.Struct, frozen=True):
    """`error`: the last line of the traceback; `where`: file, line and function that raised it.

    `trace`: the full traceback, if the worker has not printed it: a peer was gone, so it is most likely a consequence.
    `step`: the worker's step; -1: it has made none.
    """

    error: str
    where: str = ""
    trace: str = ""
    step: int = -1


class FinalErrors:
    """The launcher's end of one worker's pipe. Main thread only."""

    def __init__(self, *, prints: bool = False) -> None:
        """`prints`: the worker prints every traceback itself, since its stderr goes into a file."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self.environment = last_words_to(self._write, prints=prints)
        self.pass_fds = (self._write,)

    def started(self) -> None:
        """The worker has inherited its end of the pipe: close it here."""
        os.close(self._write)
        self._write = -1

    def hear(self) -> WorkerError | None:
        """The report of a worker that has ended; None: there is none. Only the first call returns it."""
        with contextlib.suppress(BlockingIOError, msgspec.DecodeError):
            return msgspec.json.decode(os.read(self._read, 65536), type=WorkerError)
        return None

    def stacks(self, child: Child) -> str:
        """The stacks of all Python threads of a worker that is silent, even if a thread holds the GIL.

        Empty if the worker has not loaded its settings yet, or is stopped. Blocks for at most `_STACKS_S`. A script
        without hooks is ended by this signal: call it only for a worker that is killed next.
        """
        child.signal_alone(STACK_SIGNAL)
        text, deadline = b"", time.monotonic() + _STACKS_S
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._read], [], [], min(left, _QUIET_S) if text else left)[0]:
                break
            more = os.read(self._read, 65536)
            if not more:
                break
            text += more
        return text.decode(errors="replace")

    def close(self) -> None:
        """Idempotent."""
        for fd in (self._read, self._write):
            if fd >= 0:
                os.close(fd)
        self._read = self._write = -1
