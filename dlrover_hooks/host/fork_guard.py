"""What a forked child may do with its parent's objects: nothing that the parent, the keeper or the master would notice.

The child (a DataLoader worker, an `os.fork` of the user's) has the objects, but not the threads behind them, and locks
may be held for ever by threads that it does not have. Exit handlers, `with` blocks and the garbage collector run there,
too. So whoever ends, sends or waits asks first.
"""

from __future__ import annotations

import os


class _Process:
    """This one, without a system call for each question."""

    pid = os.getpid()


def _forked() -> None:
    _Process.pid = os.getpid()


os.register_at_fork(after_in_child=_forked)


class ForkGuard:
    """True in the process that made it, false in those forked from it. Takes no lock; any thread."""

    def __init__(self) -> None:
        self.pid = _Process.pid

    def __bool__(self) -> bool:
        return self.pid == _Process.pid
