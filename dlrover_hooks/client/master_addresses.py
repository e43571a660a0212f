"""The addresses of the masters, of which one leads, and which of them is asked next."""

from __future__ import annotations

import math
import threading
import time

from dlrover_hooks.errors import UsageError

_SILENT_S = 5.0
"""A standby that names a master that was silent just now does not know better: it learns later of a leader that was
stopped, and to ask that one again costs a timeout. One that refuses connections costs nothing to ask again."""


class MasterAddresses:
    """`urls`: one, or several separated by commas. Shared by the calls and the liveness connection of a client.

    Raises:
        UsageError: some are https and others are not.
    """

    def __init__(self, urls: str) -> None:
        self._urls = [one.strip().rstrip("/") for one in urls.split(",") if one.strip()]
        if len({one.startswith("https:") for one in self._urls}) > 1:
            raise UsageError(
                f"The addresses of the masters {urls} mix http and https.",
                hint="Serve HTTPS with all masters or with none: --ssl-certfile.",
            )
        self._at = 0
        self._silent, self._silent_at = "", -math.inf
        self.renew()

    def renew(self) -> None:
        """Also called in a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    @property
    def current(self) -> str:
        """The one to ask."""
        return self._urls[self._at]

    @property
    def several(self) -> bool:
        """More than one is known."""
        return len(self._urls) > 1

    def failed(self, url: str, leader: str = "", *, silent: bool = False) -> bool:
        """`url` did not answer, or leads no longer: ask `leader` next, if `url` named one, otherwise the one after it.

        `silent`: there was no answer in time. Returns whether another one is asked now. Does nothing if another thread
        has learned it before.
        """
        with self._lock:
            if self.current != url or leader == url:
                return False
            if silent:
                self._silent, self._silent_at = url, time.monotonic()
            elif leader == self._silent and time.monotonic() < self._silent_at + _SILENT_S:
                return False
            if leader and leader not in self._urls:
                self._urls.append(leader)
            self._at = self._urls.index(leader) if leader else (self._at + 1) % len(self._urls)
            return self.current != url
