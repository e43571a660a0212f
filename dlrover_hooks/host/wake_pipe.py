"""How a thread wakes the main thread, which waits in a selector."""

from __future__ import annotations

import contextlib
import os
import selectors


class WakePipe:
    """A pipe in `selector`. `wake` on any thread, the other methods on the thread that selects."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        selector.register(self._read, selectors.EVENT_READ)

    def wake(self) -> None:
        """Have the selector return, now or when it is asked next."""
        with contextlib.suppress(BlockingIOError):  # it is full: the selector returns anyway
            os.write(self._write, b".")

    def drain(self) -> None:
        """The selector was woken. Call it before looking at what has changed."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 1024):
                pass

    def close(self) -> None:
        """End it."""
        self._selector.unregister(self._read)
        os.close(self._read)
        os.close(self._write)
