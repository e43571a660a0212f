"""Sends this node's newest images to the keeper that holds its replicas: one thread, one image at a time (DL-91)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from dlrover_hooks.checkpoint.memory.inventory import Found
from dlrover_hooks.checkpoint.replication.peer_channel import Declined, call
from dlrover_hooks.checkpoint.replication.replica_protocol import TokenBucket
from dlrover_hooks.checkpoint.replication.transfer import Overwritten, give, pacer
from dlrover_hooks.errors import CheckpointError, KeeperAway
from dlrover_hooks.protocol import KeeperAddress, Secret

PAUSES_S = (0.25, 30.0)
"""Between two attempts to reach one that is away: the first pause, each next one twice as long, and the longest."""
_log = logging.getLogger(__name__)


class Aim(NamedTuple):
    """Where images go, and who says so."""

    to: KeeperAddress
    secret: Secret
    node: str


class Sender:
    """All calls on the loop's thread; `failed(found, why)` is called on the sender's.

    Of each seat only the newest image waits. One that is being sent is finished as long as its slot holds: dropping it
    for every newer one would never end where sending takes longer than the time between two saves.
    """

    def __init__(self, failed: Callable[[Found, CheckpointError], None]) -> None:
        self.sent = 0
        self.lost = 0
        """Images that were not sent, or not whole."""
        self._failed = failed
        self._aim: Aim | None = None
        self._pace = TokenBucket(0.0)
        self._waiting: dict[int, Found] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper-sender", daemon=True)

    def aim(self, to: KeeperAddress | None, secret: Secret, node: str, bytes_per_s: float) -> None:
        """From here on images of `node` go there (None: nowhere)."""
        with self._changed:
            self._aim = Aim(to, secret, node) if to is not None else None
            self._pace.rate = bytes_per_s
            if not self._thread.ident:
                self._thread.start()
            self._changed.notify()

    def put(self, found: Found) -> None:
        """The newest image of its seat."""
        with self._changed:
            self._waiting[found.segment.seat] = found
            self._changed.notify()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while (work := self._next()) is not None:
            found, aim = work
            try:
                self._send(found, *aim)
                self.sent, pause_s = self.sent + 1, PAUSES_S[0]
            except CheckpointError as error:
                self.lost += 1
                self._failed(found, error)
                if isinstance(error, KeeperAway) and not isinstance(error, (Declined, Overwritten)):
                    self._try_again(found, aim, pause_s)
                    pause_s = min(2 * pause_s, PAUSES_S[1])
            except Exception as error:  # of this image; the next ones are sent all the same
                _log.exception("an image of seat %d was not sent", found.segment.seat)
                self.lost += 1
                self._failed(found, CheckpointError(f"{type(error).__name__}: {error}"))
            del work, found  # it may hold a segment that is to be freed

    def _next(self) -> tuple[Found, Aim] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or (self._aim is not None and self._waiting))
            if self._closing.is_set() or self._aim is None:
                return None
            return self._waiting.pop(next(iter(self._waiting))), self._aim

    def _try_again(self, found: Found, aim: Aim, pause_s: float) -> None:
        """After a pause, or at once with another aim; unless there is a newer image by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or self._aim is not aim, pause_s)
            self._waiting.setdefault(found.segment.seat, found)

    def _send(self, found: Found, to: KeeperAddress, secret: Secret, node: str) -> None:
        channel = call(to, secret, node, within_s=0.0)
        try:
            give(channel, found, node, pacer(self._pace, self._closing.wait))
        finally:
            channel.close()
