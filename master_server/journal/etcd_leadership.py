"""Which of several masters leads: the one whose key in etcd lives. Its key's creation revision is the epoch.

The epoch is a condition of every write of the journal, so a master that was replaced writes nothing, however late it
learns of it. It stops to answer by its own clock before its lease can have expired: the lease is extended six times
in its time to live, and counts from the moment at which the extension was sent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable

import msgspec

from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.master.journal.etcd_gateway import EtcdAway, EtcdGateway, EtcdRefused, created_at, now, put

log = logging.getLogger("dlrover_hooks.master")
TTL_S = 2
"""Time to live of the leader's lease in seconds. etcd makes it at least 1.5 election timeouts (1.5 s by default)."""
POLL_S = 0.25
"""Pause between two looks of a standby at the leader's key."""


class Leader(msgspec.Struct, frozen=True):
    """The value of the leader's key. `address`: URL at which it serves; `id`: of its candidacy."""

    address: str
    id: str


class EtcdLeadership:
    """A `Leadership`: this process's candidacy for `key`.

    `lost` is called when the leadership is lost, perhaps several times, on any thread; not after `resign`.
    """

    def __init__(
        self, etcd: EtcdGateway, key: bytes, address: str, lost: Callable[[], None], *, ttl_s: int = TTL_S
    ) -> None:
        self.epoch = 0
        """Revision at which this leader's key was created; 0: it has not been elected."""
        self.leader = ""
        self._etcd, self.key, self._lost, self._ttl_s = etcd, key, lost, ttl_s
        self._me = Leader(address=address, id=uuid.uuid4().hex)
        self._lease = 0
        self._until = 0.0
        self._thread = BackgroundThread(
            "dlrover-hooks-leader", self._keep, where="the leadership of this master", on_error="warn", again_s=0.0,
            failed=lambda error: self.give_up(),
        )  # fmt: skip

    def holds(self) -> bool:
        """See `Leadership`: its lease cannot have expired."""
        return now() < self._until

    def campaign(self, stop: threading.Event, meanwhile: Callable[[], None]) -> bool:
        """See `Leadership`. Errors of etcd are logged once and tried again."""
        said = False
        while not stop.is_set():
            try:
                if self._elected():
                    self._thread.start()
                    return True
                meanwhile()
                said = False
            except (EtcdAway, EtcdRefused) as error:
                if not said:
                    log.warning(
                        "this standby cannot follow: %s. Does etcd run there? With TLS it is etcds://. Trying on", error
                    )
                said = True
            stop.wait(POLL_S)
        return False

    def pause(self, seconds: float) -> None:
        """Wait, at most until the leadership is given up."""
        self._thread.stopping.wait(seconds)

    def resign(self) -> None:
        """See `Leadership`."""
        self._until = 0.0
        self._thread.stop()
        if self._lease:
            with contextlib.suppress(HooksError):  # it expires
                self._etcd.revoke(self._lease)
            self._lease = 0

    def give_up(self) -> None:
        """Stop to lead because another one leads, or may lead."""
        self._until = 0.0
        if not self._thread.stopping.is_set():
            self._lost()

    def _elected(self) -> bool:
        found = self._etcd.get(self.key)
        if found is None:
            if not self._lease:
                self._lease = self._etcd.grant(self._ttl_s)
            sent = now()
            if not self._etcd.keep_alive(self._lease):
                self._lease = 0
                return False
            mine = put(self.key, msgspec.json.encode(self._me), self._lease)
            self._etcd.transaction([created_at(self.key, 0)], [mine])
            found = self._etcd.get(self.key)  # also tells the outcome of a transaction without an answer
            self._until = sent + self._margin()
        if found is None:
            return False
        leader = msgspec.json.decode(found.value, type=Leader)
        self.leader = leader.address
        if leader.id != self._me.id:
            self._until = 0.0
            return False
        self.epoch = found.created
        return self.holds()

    def _margin(self) -> float:
        """Seconds after an extension was sent for which this process leads: the rest is for a pause between the look at
        the clock and the answer.
        """
        return 0.9 * self._ttl_s

    def _keep(self) -> None:
        while not self._thread.stopping.wait(self._ttl_s / 6 if now() < self._until else 0.0):
            if not self.holds():
                return self.give_up()
            sent = now()
            try:
                if not self._etcd.keep_alive(self._lease):
                    return self.give_up()
            except (EtcdAway, EtcdRefused) as error:
                log.warning("the leader's lease was not extended: %s", error)
            else:
                self._until = max(self._until, sent + self._margin()) if self.holds() else 0.0
