"""etcd in virtual time: one consistent store behind members that fail, and clients whose requests may be lost.

It answers what `EtcdGateway` sends, in the form of etcd's JSON gateway (tests/contracts/test_etcd_contract.py compares
it with a real one). What its members agree on among themselves is left out: a request that is carried out is carried
out once and for all, at one moment, perhaps after its sender has stopped to wait for it.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import requests
from urllib3.exceptions import NewConnectionError

from dlrover_hooks.master.journal.etcd_gateway import EtcdGateway
from tests.simulation.loop import Loop
from tests.simulation.threadlets import Bell

Answer = tuple[int, dict[str, Any]]
NO_SPACE = 500, {"code": 8, "error": "etcdserver: mvcc: database space exceeded"}
NO_LEASE = 404, {"code": 5, "error": "etcdserver: requested lease not found"}


class Stored(NamedTuple):
    """A key's value."""

    value: bytes
    created: int
    lease: int


class EtcdStore:
    """Keys, leases, transactions. `now`: seconds. `on_put` is called with each key and value that is stored."""

    def __init__(
        self, now: Callable[[], float], on_put: Callable[[bytes, bytes], None] = lambda key, value: None
    ) -> None:
        self._now, self._on_put = now, on_put
        self.keys: dict[bytes, Stored] = {}
        self.full = False
        """Its quota is used up."""
        self._revision = self._leases = 0
        self._ends: dict[int, tuple[float, int]] = {}
        """By lease: when it expires, and its time to live."""

    def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Carry one request out."""
        self._expire()
        return {
            "/v3/kv/range": self._range,
            "/v3/kv/txn": self._transaction,
            "/v3/lease/grant": self._grant,
            "/v3/lease/keepalive": self._keep_alive,
            "/v3/lease/revoke": self._revoke,
        }[path](body)

    def get(self, key: bytes) -> Stored | None:
        """What is stored now."""
        self._expire()
        return self.keys.get(key)

    def _expire(self) -> None:
        for lease in [lease for lease, (end, _) in self._ends.items() if end <= self._now()]:
            self._end(lease)

    def _end(self, lease: int) -> None:
        del self._ends[lease]
        for key in [key for key, stored in self.keys.items() if stored.lease == lease]:
            del self.keys[key]
            self._revision += 1

    def _range(self, body: Mapping[str, Any]) -> Answer:
        first, end, limit = _bytes(body["key"]), _bytes(body["range_end"]), int(body.get("limit", 0))
        found = sorted(key for key in self.keys if first <= key < end)
        shown = found[:limit] if limit else found
        values = [
            {"key": _text(key), "create_revision": str(self.keys[key].created)}
            | ({} if body.get("keys_only") or not self.keys[key].value else {"value": _text(self.keys[key].value)})
            for key in shown
        ]
        return 200, {"kvs": values, "more": len(shown) < len(found), "count": str(len(found))}

    def _transaction(self, body: Mapping[str, Any]) -> Answer:
        puts = [one["requestPut"] for one in body["success"] if "requestPut" in one]
        if puts and self.full:
            return NO_SPACE
        conditions = ((_bytes(one["key"]), int(one["createRevision"])) for one in body["compare"])
        if not all((self.keys[key].created if key in self.keys else 0) == created for key, created in conditions):
            return 200, {"succeeded": False}
        if any(int(one.get("lease", 0)) not in {0, *self._ends} for one in puts):
            return NO_LEASE
        self._revision += 1
        for one in body["success"]:
            if "requestPut" in one:
                self._put(one["requestPut"])
            else:
                first, end = _bytes(one["requestDeleteRange"]["key"]), _bytes(one["requestDeleteRange"]["range_end"])
                for key in [key for key in self.keys if first <= key < end]:
                    del self.keys[key]
        return 200, {"succeeded": True}

    def _put(self, body: Mapping[str, Any]) -> None:
        key, value = _bytes(body["key"]), _bytes(body["value"])
        before = self.keys.get(key)
        self.keys[key] = Stored(value, before.created if before else self._revision, int(body.get("lease", 0)))
        self._on_put(key, value)

    def _grant(self, body: Mapping[str, Any]) -> Answer:
        if self.full:
            return NO_SPACE
        self._leases += 1
        ttl_s = int(body["TTL"])
        self._ends[self._leases] = self._now() + ttl_s, ttl_s
        return 200, {"ID": str(self._leases), "TTL": str(ttl_s)}

    def _keep_alive(self, body: Mapping[str, Any]) -> Answer:
        lease = int(body["ID"])
        if lease not in self._ends:
            return 200, {"result": {"ID": str(lease)}}
        ttl_s = self._ends[lease][1]
        self._ends[lease] = self._now() + ttl_s, ttl_s
        return 200, {"result": {"ID": str(lease), "TTL": str(ttl_s)}}

    def _revoke(self, body: Mapping[str, Any]) -> Answer:
        if int(body["ID"]) not in self._ends:
            return NO_LEASE
        self._end(int(body["ID"]))
        return 200, {}


class EtcdCluster:
    """Members in front of an `EtcdStore`. Times are those of the loop."""

    def __init__(self, loop: Loop, dice: random.Random, members: int, on_put: Callable[[bytes, bytes], None]) -> None:
        self.store = EtcdStore(lambda: loop.now, on_put)
        self.loop, self._dice = loop, dice
        self.members = tuple(f"m{index}" for index in range(members))
        self.down: dict[str, float] = {}
        """Killed members, until when."""
        self.slow_until = self.lossy_until = 0.0
        self.cut: dict[str, float] = {}
        """Masters that reach no member, until when."""
        self.lose_next: Callable[[], float] | None = None
        """Called with the next transaction, which gets no answer. Returns how late in seconds it is carried out."""

    def heal(self) -> None:
        """From now on every request is answered soon."""
        self.down.clear()
        self.cut.clear()
        self.slow_until = self.lossy_until = 0.0
        self.store.full = False

    def post(self, master: str, member: str, path: str, body: Mapping[str, Any], turn_s: float) -> Answer:
        """One attempt of a thread. Raises requests.ConnectionError, requests.Timeout."""
        if self._is(self.down, member):
            raise requests.ConnectionError(_Refused(member))
        bell, lost = Bell(self.loop), self._is(self.cut, master)
        if not lost:
            self._carry_out(path, body, bell)
        if not bell.wait(turn_s):
            raise requests.ReadTimeout(member)
        answer: Any = bell.value
        return answer

    def _carry_out(self, path: str, body: Mapping[str, Any], bell: Bell) -> None:
        no_quorum = sum(self._is(self.down, one) for one in self.members) * 2 > len(self.members)
        lossy = self.loop.now < self.lossy_until
        if lossy and self._dice.random() < 0.3:
            return
        wait = self._delay()
        if self.lose_next is not None and path == "/v3/kv/txn":
            self.lose_next, lose = None, self.lose_next
            self.loop.deliver(lose(), self.store.answer, path, body)
            return
        if no_quorum or (lossy and self._dice.random() < 0.1):  # proposed, and agreed on much later if ever
            if self._dice.random() < 0.5:
                self.loop.deliver(self._dice.uniform(0.0, 8.0), self.store.answer, path, body)
            return

        def arrive() -> None:
            answer = self.store.answer(path, body)
            if not (lossy and self._dice.random() < 0.3):
                self.loop.deliver(self._delay(), bell.ring, answer)

        self.loop.deliver(wait, arrive)

    def _delay(self) -> float:
        """Of a request or an answer."""
        return 0.0005 * self._dice.expovariate(1.0) * (1000.0 if self.loop.now < self.slow_until else 1.0)

    def _is(self, until: dict[str, float], name: str) -> bool:
        return self.loop.now < until.get(name, 0.0)


class SimulatedGateway(EtcdGateway):
    """`EtcdGateway`, for the threads of the process `master`."""

    def __init__(self, cluster: EtcdCluster, master: str, turn_s: float) -> None:
        super().__init__(cluster.members, turn_s=turn_s)
        self._cluster, self._master = cluster, master

    def _post(self, member: str, path: str, body: Mapping[str, Any]) -> Answer:
        return self._cluster.post(self._master, member, path, body, self._turn_s)


class _Refused(Exception):
    """As urllib3 tells that no connection was made."""

    def __init__(self, member: str) -> None:
        super().__init__(member)
        self.reason = NewConnectionError(member, "refused")  # type: ignore[arg-type]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
