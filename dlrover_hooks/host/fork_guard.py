"""Prevents a forked child from using its parent's objects in a way that the parent, keeper or master would notice.

The child (a DataLoader worker, or an `os.fork` by the user) has the objects, but not the threads that serve them. Locks
may be held for ever by threads that the child does not have. Exit handlers, `with` blocks and the garbage collector
also run in the child. Therefore, code that ends something, sends or waits checks a `ForkGuard` first.
"""

from __future__ import annotations

import os


class _Process:
    """The pid of this process, cached to avoid a system call per check."""

    pid = os.getpid()


def _forked() -> None:
    _Process.pid = os.getpid()


os.register_at_fork(after_in_child=_forked)


class ForkGuard:
    """True in the process that created it, false in processes forked from it. Takes no lock; any thread."""

    def __init__(self) -> None:
        self.pid = _Process.pid

    def __bool__(self) -> bool:
        return self.pid == _Process.pid
