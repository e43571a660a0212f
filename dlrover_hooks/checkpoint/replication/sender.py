"""Sends this node's newest images to the keeper that holds its replicas: one thread, one image at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from dlrover_hooks.checkpoint.memory.keeper_segments import Found
from dlrover_hooks.checkpoint.replication.peer_channel import Declined, call
from dlrover_hooks.checkpoint.replication.replica_protocol import TokenBucket
from dlrover_hooks.checkpoint.replication.transfer import Overwritten, give
from dlrover_hooks.errors import CheckpointError, KeeperAway
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import KeeperAddress, Secret

PAUSES_S = (0.25, 30.0)
"""Pause between two attempts to reach a keeper: the first one, doubled each time, and the longest."""
_log = logging.getLogger(__name__)


class ReplicaTarget(NamedTuple):
    """The receiver of the images, and the sender's credentials."""

    to: KeeperAddress
    secret: Secret
    node: str


class Sender:
    """All calls on the loop's thread; `failed(found, why)` is called on the sender's thread.

    Per worker only the newest image waits. A transfer is finished as long as its slot is not overwritten: if every
    newer image aborted it, none would finish where a transfer takes longer than the time between two saves.
    """

    def __init__(self, failed: Callable[[Found, CheckpointError], None]) -> None:
        self.sent = 0
        self.lost = 0
        """Images that were not sent, or not completely."""
        self._failed = failed
        self._aim: ReplicaTarget | None = None
        self._pace = TokenBucket(0.0)
        self._waiting: dict[int, Found] = {}
        self._changed = threading.Condition()
        self._thread = BackgroundThread(
            "keeper-sender", self._run, where="replicas of this node", on_error="warn", again_s=0.0, wake=self._wake
        )

    def aim(self, to: KeeperAddress | None, secret: Secret, node: str, bytes_per_s: float) -> None:
        """From now on send images of `node` to that keeper (None: to none)."""
        with self._changed:
            self._aim = ReplicaTarget(to, secret, node) if to is not None else None
            self._pace.rate = bytes_per_s
            self._thread.start()
            self._changed.notify()

    def put(self, found: Found) -> None:
        """Queue the newest image of its worker."""
        with self._changed:
            self._waiting[found.segment.seat] = found
            self._changed.notify()

    def close(self) -> None:
        """Make the thread end; a transfer in progress is not awaited."""
        self._thread.stop(0.0)

    def _wake(self) -> None:
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
            except Exception as error:  # only this image fails; the next ones are sent
                _log.exception("an image of local rank %d was not sent", found.segment.seat)
                self.lost += 1
                self._failed(found, CheckpointError(f"{type(error).__name__}: {error}"))
            del work, found  # these may hold a segment that is to be freed

    def _next(self) -> tuple[Found, ReplicaTarget] | None:
        with self._changed:
            over = self._thread.stopping.is_set
            self._changed.wait_for(lambda: over() or (self._aim is not None and self._waiting))
            if over() or self._aim is None:
                return None
            return self._waiting.pop(next(iter(self._waiting))), self._aim

    def _try_again(self, found: Found, aim: ReplicaTarget, pause_s: float) -> None:
        """Queue it again after a pause, or at once if the receiver changed, unless a newer image waits by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread.stopping.is_set() or self._aim is not aim, pause_s)
            self._waiting.setdefault(found.segment.seat, found)

    def _send(self, found: Found, to: KeeperAddress, secret: Secret, node: str) -> None:
        channel = call(to, secret, node, within_s=0.0)
        try:
            give(channel, found, node, self._wait)
        finally:
            channel.close()

    def _wait(self, nbytes: int) -> None:
        self._thread.stopping.wait(self._pace.wait_s(nbytes, time.monotonic()))
