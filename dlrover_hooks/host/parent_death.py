"""Lifetimes of parents and children (Linux): die with the parent, and adopt orphaned descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends `number` when this process's parent ends. One system call: usable between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the subreaper: orphaned descendants become its children instead of init's."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def reap_orphans(own: Collection[int]) -> None:
    """Reap adopted children that have ended, such as the DataLoader workers of a worker that was killed.

    Skips the pids in `own`, whose exit codes are read elsewhere, and this process's own session (its subprocesses).
    """
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    except ChildProcessError:
        return
    session = os.getsid(0)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != session:
                os.waitpid(child.pid, os.WNOHANG)
