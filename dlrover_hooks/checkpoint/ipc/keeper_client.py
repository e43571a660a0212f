"""A trainer's client of its keeper: reconnects after the keeper died, and registers the worker again. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.errors import KeeperAway, UsageError
from dlrover_hooks.host.fork_guard import ForkGuard

_log = logging.getLogger(__name__)
RECONNECT_S = 1.0
"""Time to wait for the successor of a dead keeper."""
PAUSE_S = 30.0
"""Longest pause between two such attempts."""
ANSWER_S = 60.0
"""Reply timeout of a keeper that has nothing to hash."""
HASH_BYTES_PER_S = 200e6
"""Lower bound of a keeper's hash rate, for timeouts. Measured: a thread takes 0.09 s for 1 GB, 0.14 s where it bypasses
the caches to leave them to the trainers, and a keeper has two threads. This is a thirtieth of the slower rate: the
keeper has the lowest priority on a machine whose cores are all busy, and its memory may belong to another socket."""


class KeeperClient:
    """All methods from any thread; those that may have to reconnect are serialized.

    `connect(deadline_s)` opens a connection. `hello(ref)` makes the registration. `lost()` is called when a dead
    connection is dropped.
    """

    def __init__(
        self,
        connect: Callable[[float], KeeperLink],
        hello: Callable[[int], keeper_messages.Hello],
        lost: Callable[[], None],
        *,
        deadline_s: float,
    ) -> None:
        self._connect, self._hello, self._lost = connect, hello, lost
        self._deadline_s = deadline_s
        self._link: KeeperLink | None = None
        self._seated: KeeperLink | None = None
        """The connection on which the worker is registered."""
        self._pause_s, self._not_before = RECONNECT_S, 0.0
        self._closed, self.here = False, ForkGuard()
        self._lock = threading.RLock()

    @property
    def opened(self) -> bool:
        """There is, or was, a connection."""
        return self._link is not None

    @property
    def broken(self) -> bool:
        """There was a connection, and its keeper is gone."""
        return self._link is not None and not self._link.alive

    @property
    def seated(self) -> bool:
        """The worker is registered on a live connection."""
        link = self._link
        return link is not None and link.alive and self._seated is link

    def open(self) -> KeeperLink:
        """The connection; a new one if the keeper has died.

        After a failure there is no attempt for a while, twice as long each time: a keeper that is stopped, not dead,
        would otherwise cost a full timeout at every save.

        Raises:
            KeeperAway: there is no keeper.
        """
        if not self.here:
            raise KeeperAway("a forked child has no connection to the keeper", hint="save in the process that trains")
        with self._lock:
            return self._open()

    def _open(self) -> KeeperLink:
        if self._closed:
            raise KeeperAway("the connection to the keeper is closed")
        if self._link is not None and self._link.alive:
            return self._link
        if self._link is not None:
            self._link.close()
            self._link = self._seated = None
            self._lost()
        if time.monotonic() < self._not_before:
            raise KeeperAway("the keeper is away", hint="saves go on once there is one again")
        try:
            self._link = self._dial()
        except KeeperAway:
            self._not_before, self._pause_s = time.monotonic() + self._pause_s, min(2 * self._pause_s, PAUSE_S)
            self._deadline_s = min(self._deadline_s, RECONNECT_S)
            raise
        self._deadline_s, self._pause_s = min(self._deadline_s, RECONNECT_S), RECONNECT_S
        return self._link

    def seat(self) -> KeeperLink:
        """The connection, with the worker registered on it. Raises as `take` does."""
        with self._lock:
            link = self.open()
            if self._seated is not link:
                self.take()
            return link

    def take(self) -> None:
        """Register this worker, also if it is registered already.

        Raises:
            KeeperAway: there is no keeper.
            UsageError: a living process of another launch saves there, or one of a newer attempt of this run.
        """
        with self._lock:
            link = self.open()
            _welcomed(link, self._hello)
            self._seated = link

    def ask(
        self, request: Callable[[int], keeper_messages.KeeperMessage], *, timeout_s: float = 60.0
    ) -> tuple[Any, int]:
        """Send a request and wait: the reply and its descriptor."""
        return self.open().call(request, timeout_s=timeout_s)

    def inventory(self, master: str | None = None) -> keeper_messages.Welcome:
        """What this node holds, once all of it is hashed. `master`: see `keeper_messages.Inventory`.

        Raises:
            KeeperAway: there is no keeper, or it did not finish hashing within the timeout.
            UsageError: a living process of another launch saves there.
        """
        return _welcomed(self.open(), lambda ref: keeper_messages.Inventory(ref=ref, master=master))

    def tell(self, message: keeper_messages.KeeperMessage) -> bool:
        """Send `message`; False if there is no connection."""
        link = self._link
        try:
            if link is None or not link.alive:
                return False
            link.send(message)
        except KeeperAway:
            return False
        return True

    def close(self, *, finished: bool) -> None:
        """Send Goodbye and close. Idempotent."""
        with self._lock:
            link, self._link, self._seated, self._closed = self._link, None, None, True
        if link is None:
            return
        try:
            if link.alive:
                link.call(lambda ref: keeper_messages.Goodbye(ref=ref, finished=finished), timeout_s=10.0)
        except KeeperAway as error:
            _log.info("%s", error.message)
        link.close()

    def _dial(self) -> KeeperLink:
        until = time.monotonic() + self._deadline_s
        while True:
            left_s = max(until - time.monotonic(), 0.0)
            link = self._connect(left_s)
            try:
                link.call(lambda ref: keeper_messages.Inventory(ref=ref, waits=False), timeout_s=max(left_s, 1.0))
            except KeeperAway:  # the keeper was ending: another one will start
                link.close()
                if time.monotonic() >= until:
                    raise
            else:
                return link


def _welcomed(link: KeeperLink, request: Callable[[int], keeper_messages.KeeperMessage]) -> keeper_messages.Welcome:
    """The reply to `request`, Hello or Inventory, which a keeper sends once its memory is hashed."""
    left = granted(
        link.call(lambda ref: keeper_messages.Inventory(ref=ref, waits=False), timeout_s=ANSWER_S)[0]
    ).unhashed_bytes
    return granted(link.call(request, timeout_s=ANSWER_S + left / HASH_BYTES_PER_S)[0])


def granted(answer: keeper_messages.KeeperMessage) -> keeper_messages.Welcome:
    """The reply to Hello or Inventory. Raises UsageError with the keeper's reason if it refused."""
    if isinstance(answer, keeper_messages.Refused):
        raise UsageError(answer.reason, hint=answer.hint)
    assert isinstance(answer, keeper_messages.Welcome)
    return answer
