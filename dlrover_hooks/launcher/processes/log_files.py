"""A worker's output in its own files, on the launcher's screen, or both: torchrun's --log-dir, --redirects, --tee.

A worker writes to its file directly, so it never waits for its launcher. A thread copies the lines to be shown from
there, each with a prefix such as `[default0]:`, as torchrun does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.background_thread import BackgroundThread

log = logging.getLogger("dlrover_hooks.run")

_LOOK_S = 0.1
"""Interval between two reads of files that are being written."""
_LONG = 1 << 16
"""Longest line: the line of a progress bar never ends."""
_END_S = 5.0
"""Timeout for showing the last lines."""
_NAMES = {1: "stdout", 2: "stderr"}
"""By descriptor, which is also its bit in torchrun's numbers: 1 stdout, 2 stderr, 3 both."""


class Streams(msgspec.Struct, frozen=True):
    """Which streams of which worker: `by_rank` by local rank, `default` of all others."""

    default: int = 0
    by_rank: Mapping[int, int] = {}

    def has(self, local_rank: int, descriptor: int) -> bool:
        """Whether the stream is selected."""
        return bool(self.by_rank.get(local_rank, self.default) & descriptor)


def streams(text: str, flag: str) -> Streams:
    """`"3"`: both of all workers; `"0:1,1:3"`: stdout of local rank 0, both of local rank 1. Raises UsageError."""
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return Streams(0, {int(rank): int(which) for rank, which in (one.split(":") for one in text.split(","))})
    hint = f"0 none, 1 stdout, 2 stderr, 3 both: {flag} 3, or by local rank: {flag} 0:1,1:3"
    raise UsageError(f"{flag} {text}: not understood", hint=hint)


class Logs:
    """Owns the thread `dlrover-hooks-logs`, if output is copied; all else is main thread only.

    Only that thread writes to the screen: if the screen's reader blocks, the thread waits, and the launcher does not.

    Args:
        folder: files are `ROUND/RANK/stdout.log` and `stderr.log` there.
        redirects: only into files.
        tee: into files and on the screen.
    """

    def __init__(self, folder: str, redirects: Streams, tee: Streams) -> None:
        self._folder, self._redirects, self._tee = folder, redirects, tee
        self._copies: dict[str, list[Copy]] = {}
        self._ended: list[Copy] = []
        self._lock = threading.Lock()
        self._thread = BackgroundThread(
            "dlrover-hooks-logs", self._run, where=f"showing the output in {folder}", on_error="warn", again_s=_LOOK_S
        )

    @contextlib.contextmanager
    def files(self, worker: str, local_rank: int, rank: int, number: int) -> Iterator[tuple[int, int]]:
        """Descriptors for stdout and stderr of `worker` (its incarnation), which is started in round `number`."""
        folder, found = os.path.join(self._folder, str(number), str(rank)), [1, 2]
        with contextlib.ExitStack() as opened:
            for index, descriptor in enumerate((1, 2)):
                seen = self._tee.has(local_rank, descriptor)
                if not seen and not self._redirects.has(local_rank, descriptor):
                    continue
                os.makedirs(folder, exist_ok=True)
                path = os.path.join(folder, f"{_NAMES[descriptor]}.log")
                file = opened.enter_context(open(path, "ab"))
                found[index] = file.fileno()
                if seen:
                    self._copy(worker, Copy(path, file.tell(), f"[default{local_rank}]:", descriptor))
            yield found[0], found[1]

    def ended(self, worker: str) -> None:
        """Show the rest of its output. Idempotent."""
        with self._lock:
            for copy in self._copies.pop(worker, ()):
                copy.bound()
                self._ended.append(copy)

    def close(self) -> None:
        """Show the rest of all output and end the thread; abandon it if the screen's reader blocks."""
        for worker in list(self._copies):
            self.ended(worker)
        if not self._thread.stop(_END_S):
            log.warning("the output of the workers is not read: what was not shown is in %s", self._folder)

    def _copy(self, worker: str, copy: Copy) -> None:
        with self._lock:
            self._copies.setdefault(worker, []).append(copy)
        self._thread.start()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._thread.stopping.wait(_LOOK_S)
            with self._lock:
                ended, self._ended = self._ended, []
                running = [copy for copies in self._copies.values() for copy in copies]
            for copy in ended:
                copy.end()
            for copy in running:
                copy.go_on()


class Copy:
    """Copies complete lines of one growing file to the launcher's own `descriptor`."""

    def __init__(self, path: str, at: int, prefix: str, descriptor: int) -> None:
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - `end` closes it
        self._file.seek(at)
        self._prefix, self._rest = prefix.encode(), b""
        self._until: int | None = None
        self._screen = descriptor

    def bound(self) -> None:
        """The worker has ended: later content of the file belongs to another one. Main thread."""
        self._until = os.fstat(self._file.fileno()).st_size

    def go_on(self) -> None:
        """Show the complete lines written so far."""
        more = self._file.read() if self._until is None else self._file.read(max(0, self._until - self._file.tell()))
        *lines, self._rest = (self._rest + more).split(b"\n")
        if len(self._rest) > _LONG:
            lines, self._rest = [*lines, self._rest], b""
        self._show(lines)

    def end(self) -> None:
        """Show what is left, and close the file."""
        self.go_on()
        self._show([self._rest] if self._rest else [])
        self._file.close()

    def _show(self, lines: list[bytes]) -> None:
        text = memoryview(b"".join(self._prefix + line + b"\n" for line in lines))
        with contextlib.suppress(OSError):  # the screen was closed
            while text:  # as bytes: the screen may support fewer characters than the worker
                text = text[os.write(self._screen, text) :]
