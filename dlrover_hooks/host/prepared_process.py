"""Starts a program in a process that has set its own limits before.

`subprocess` can run a Python function between fork and exec (`preexec_fn`), but only of a process without other
threads: in the child the locks and the libraries of all other threads are in any state. See decision 0030.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

_PROGRAM = str(Path(__file__).with_name("exec_prepared.py"))
_START_S = 60.0
"""An interpreter starts within 10 ms; on a machine that swaps, within seconds."""


class Preparation(msgspec.Struct, frozen=True):
    """What a new process does before its program runs.

    death_signal: the kernel sends it when the thread that started the process ends; None: nothing.
    cgroups: open files `cgroup.procs` or `tasks` of control groups that it enters.
    cores: the only ones that it runs on; None: all.
    data_bytes: soft limit RLIMIT_DATA; None: unchanged.
    """

    death_signal: signal.Signals | None = None
    cgroups: tuple[int, ...] = ()
    cores: frozenset[int] | None = None
    data_bytes: int | None = None


class StartReport:
    """The pipe by which a process that prepares itself says what failed. Its end means that the program runs."""

    def __init__(self) -> None:
        self._told, self.descriptor = os.pipe()
        """`descriptor`: for the process alone, in its `pass_fds`."""

    def problem(self) -> OSError | None:
        """Wait until the program runs, or could not be started. Called once, after the process was started."""
        self._close_descriptor()
        watch = select.poll()
        watch.register(self._told, select.POLLIN)
        if not watch.poll(_START_S * 1000):
            return OSError(errno.ETIMEDOUT, f"its program did not run within {_START_S:g} s")
        with open(self._told, "rb", closefd=False) as file:
            number, _, rest = file.read().decode(errors="replace").partition("\0")
        text, _, path = rest.partition("\0")
        return OSError(int(number), text, *([path] if path else [])) if number else None

    def close(self) -> None:
        """Close the pipe."""
        self._close_descriptor()
        os.close(self._told)

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def prepared_command(command: Sequence[str], preparation: Preparation, report: int | None = None) -> list[str]:
    """The command line of a process that prepares itself and then runs `command`. Called by its parent process.

    `report`: see `StartReport`; None: what fails is written to stderr, and the exit code is 127.
    """
    return [
        sys.executable, "-I", "-S", _PROGRAM, _word(report), str(os.getpid()), _word(preparation.death_signal),
        _words(preparation.cgroups), _words(preparation.cores), _word(preparation.data_bytes), *command,
    ]  # fmt: skip


def _word(value: int | None) -> str:
    return "-" if value is None else str(int(value))


def _words(values: Iterable[int] | None) -> str:
    return ",".join(map(str, sorted(values))) if values else "-"
