"""What a forked child may do with its parent's objects: nothing that the parent, the keeper or the master would notice.

The child (a DataLoader worker, an `os.fork` of the user's) has the objects, but not the threads behind them, and locks
may be held for ever by threads that it does not have. Exit handlers, `with` blocks and the garbage collector run there,
too. So whoever ends, sends or waits asks first.
"""

from __future__ import annotations

import os


class Here:
    """True in the process that made it, false in those forked from it. Takes no lock; any thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __bool__(self) -> bool:
        return os.getpid() == self.pid
