"""Measures this node in a child process, each measurement with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.protocol import Measure, MeasureKind

_TURN_S = 0.2
_START = Measure(MeasureKind.COMPUTE, "start")
"""What the child does until it prints its first line: it imports torch, which looks for devices."""


def _nothing(*_: object) -> None:
    pass


def measure_node(
    folder: str,
    timeout_s: float,
    *,
    begins: Callable[[Measure], object] = _nothing,
    ended: Callable[[Measure], object] = _nothing,
    turn: Callable[[], object] = _nothing,
) -> tuple[Measure, ...]:
    """All measurements of this node. One that takes longer than `timeout_s`, or ends the child, has failed.

    Args:
        folder: where the disk is measured.
        timeout_s: for each measurement, and for the start of the child.
        begins: called with each measurement before it is made, `ended` with its result.
        turn: called several times a second. What it raises ends the child, and is raised here.
    """
    found: list[Measure] = []
    current, until = _START, time.monotonic() + timeout_s
    with _child(folder) as (child, lines):
        while True:
            turn()
            said = lines.read(_TURN_S)
            if said is None:
                if time.monotonic() < until:
                    continue
                failed = f"no result within {timeout_s:g} s"
            elif said:
                measure = msgspec.json.decode(said, type=Measure)
                current, until = measure, time.monotonic() + timeout_s
                if measure.speed is None and not measure.failed:
                    begins(measure)
                else:
                    found.append(measure)
                    ended(measure)
                continue
            elif (code := child.wait(timeout_s)) == 0:
                break
            else:
                failed = f"the process that measures ended: {described(code) if code is not None else 'not yet'}"
            found.append(msgspec.structs.replace(current, speed=None, failed=failed))
            ended(found[-1])
            break
    return tuple(found)


def check_folder() -> str:
    """Where the disk is measured if no folder is named: `save_to` if it is a folder here, else the temporary one."""
    save_to = settings.load().save_to
    return save_to if save_to and os.path.isdir(save_to) else tempfile.gettempdir()


class _Lines:
    """Lines of a pipe, read with a deadline."""

    def __init__(self, fd: int) -> None:
        self._fd, self._data, self._ended = fd, b"", False

    def read(self, within_s: float) -> bytes | None:
        """The next line; empty at the end; None: not within that time."""
        until = time.monotonic() + within_s
        while b"\n" not in self._data and not self._ended:
            if not select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = os.read(self._fd, 65536)
            self._data, self._ended = self._data + more, not more
        line, _, self._data = self._data.partition(b"\n")
        return line


@contextlib.contextmanager
def _child(folder: str) -> Iterator[tuple[Child, _Lines]]:
    read_end, write_end = os.pipe()
    try:
        command = [sys.executable, "-m", "dlrover_hooks.node_check.measuring_process", str(write_end), folder]
        try:
            child = Child(
                "node check", command, env=settings.environment(), pass_fds=[write_end], die_with_parent=True, stdout=2
            )
        finally:
            os.close(write_end)
        try:
            yield child, _Lines(read_end)
        finally:
            child.end()
    finally:
        os.close(read_end)
