"""One child process of the launcher, in its own session so that it and all its descendants can be ended together."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from dlrover_hooks.host.prepared_process import Preparation, StartReport, prepared_command

log = logging.getLogger("dlrover_hooks.run")

_DEATH_S = 5.0
"""A killed process ends within milliseconds, unless it is in uninterruptible sleep in the kernel."""
ALIVE = set[int]()
"""Process ids of children of this process that are not reaped yet."""
STARTING = threading.Lock()
"""Held while a process exists that is not in `ALIVE` yet: what reaps all others waits for it."""


class Process(Protocol):
    """The part of `subprocess.Popen` used here."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Child:
    """A started process. `fileno()` is its pidfd: readable once it has died, for `selectors`.

    Args:
        name: its name in log messages, such as "worker 1".
        die_with_parent: the kernel kills it if the thread that starts it ends, and so if the launcher dies (for
            workers, whose round is then over).
        limits: set before it runs `command`; their `death_signal` is that of `die_with_parent`.

    Raises OSError if `command` cannot be run, or a limit cannot be set.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        die_with_parent: bool = False,
        stdout: int | None = None,
        stderr: int | None = None,
        limits: Preparation | None = None,
    ) -> None:
        self.name, self.started_at = name, time.monotonic()
        if die_with_parent:
            limits = msgspec.structs.replace(limits or Preparation(), death_signal=signal.SIGKILL)
        with contextlib.ExitStack() as opened:
            report = None
            if limits is not None:
                report = opened.enter_context(contextlib.closing(StartReport()))
                command = prepared_command(command, limits, report.descriptor)
                pass_fds = (*pass_fds, report.descriptor, *limits.cgroups)
            with STARTING:
                self._process: Process = subprocess.Popen(
                    command,
                    env=dict(env),
                    pass_fds=pass_fds,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
                self.pid = self._process.pid
                self._follow()
            if report is not None and (problem := report.problem()) is not None:
                self.end()
                raise problem

    def _follow(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # too many open files: nothing would ever learn of its end
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()
            raise
        ALIVE.add(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def exit_code(self) -> int | None:
        """None while alive; negative: the signal that ended it. Reaps the process."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the whole session: DataLoader workers hold the same sockets as their parent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def signal_alone(self, number: int) -> None:
        """Send `number` to the process without its descendants."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def state(self) -> str:
        """What the kernel says the process does, such as "running", "sleeping", "stopped" or "disk-sleep" (psutil)."""
        import psutil

        try:
            return str(psutil.Process(self.pid).status())
        except psutil.NoSuchProcess:
            return "gone"

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process alone: if its DataLoader workers died too, the step that it saves would fail."""
        self.signal_alone(signal.SIGTERM)

    def end(self, grace_s: float = 0.0) -> int:
        """SIGTERM, then SIGKILL to the whole session after `grace_s`. Returns the exit code. Closes the pidfd."""
        if grace_s > 0:
            self.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self.signal(signal.SIGKILL)
        return self.reap()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None if it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def reap(self) -> int:
        """The exit code of a process that has ended or was killed. Closes the pidfd.

        A process that the kernel does not end in time is abandoned and reported as killed.
        """
        code = self.wait(_DEATH_S)
        if self._pidfd >= 0:
            if code is None:
                log.error(
                    "%s (process %d) does not end, %g s after SIGKILL: it hangs in the kernel, on a disk or a device. "
                    "Going on without it; if ps still shows it in state D, the node has to be restarted",
                    self.name, self.pid, _DEATH_S,
                )  # fmt: skip
            os.close(self._pidfd)
            self._pidfd = -1
            ALIVE.discard(self.pid)
        return -signal.SIGKILL if code is None else code


def described(exit_code: int) -> str:
    """`exit_code` as text: "SIGKILL" or "exit code 1"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"signal {-exit_code}"
