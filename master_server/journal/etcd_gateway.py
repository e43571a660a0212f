"""A client of etcd's JSON gateway (etcd 3.4 and later): key ranges, transactions, leases. Blocking; any thread.

https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/: keys and values are base64, integers are strings.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import requests
from urllib3.exceptions import NewConnectionError

from dlrover_hooks.config import Tls
from dlrover_hooks.errors import HooksError

_REFUSED = {3, 5, 7, 8, 9, 11, 16}
"""gRPC status codes of a request that was certainly not carried out: invalid argument, not found, permission denied,
resource exhausted (etcd's disk quota), failed precondition, out of range, unauthenticated. After any other error
(unavailable, deadline exceeded, unknown) it may have been."""
_UNAUTHENTICATED = 16
_TURN_S = 1.0
"""A member that does not answer within this time is passed over."""
_PAGE = 64
"""Keys per range request: values have up to 1 MiB."""


class EtcdRefused(HooksError):
    """etcd has not carried out the request, and says why."""


class EtcdAway(HooksError):
    """No member has answered: the request may or may not have been carried out."""


class EtcdKey(NamedTuple):
    """A key with its value and the revision of its creation."""

    key: bytes
    value: bytes
    created: int


class EtcdAccess(msgspec.Struct, frozen=True):
    """For an etcd that is protected. `tls`: usable files; None: no TLS. `user`: empty if no password is needed."""

    tls: Tls | None = None
    user: str = ""
    password: str = ""


class EtcdGateway:
    """`members`: `HOST:PORT` of each. Every request is sent to one after the other until one answers.

    A request may therefore be carried out twice: callers send only what may be repeated.
    """

    def __init__(
        self,
        members: Sequence[str],
        *,
        turn_s: float = _TURN_S,
        access: EtcdAccess = EtcdAccess(),  # noqa: B008
    ) -> None:
        self._members, self._turn_s, self._at = tuple(members), turn_s, 0
        self._access, self._token = access, ""
        """The token of `access.user`. etcd forgets it after five minutes without use, and when a member restarts."""
        self._local = threading.local()

    def range(self, first: bytes, end: bytes, *, limit: int = 0, keys_only: bool = False) -> list[EtcdKey]:
        """Keys from `first` up to, not including, `end`, in order. Raises EtcdAway, EtcdRefused."""
        found: list[EtcdKey] = []
        while True:
            size = min(_PAGE, limit - len(found)) if limit else _PAGE
            asked = {"key": _b64(first), "range_end": _b64(end), "limit": str(size), "keys_only": keys_only}
            reply = self.call("/v3/kv/range", asked)
            page = [_key(one) for one in reply.get("kvs", ())]
            found += page
            if not reply.get("more") or not page or len(found) == limit:
                return found
            first = page[-1].key + b"\0"

    def get(self, key: bytes) -> EtcdKey | None:
        """One key. Raises EtcdAway, EtcdRefused."""
        found = self.range(key, key + b"\0", limit=1)
        return found[0] if found else None

    def transaction(self, compare: Sequence[Mapping[str, Any]], success: Sequence[Mapping[str, Any]]) -> bool:
        """Do all of `success` if all of `compare` hold. Returns whether they did.

        Raises:
            EtcdRefused: nothing was done.
            EtcdAway: unknown.
        """
        reply = self.call("/v3/kv/txn", {"compare": list(compare), "success": list(success)})
        return bool(reply.get("succeeded"))

    def grant(self, ttl_s: int) -> int:
        """A new lease's id. Raises EtcdAway, EtcdRefused."""
        return int(self.call("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"])

    def keep_alive(self, lease: int) -> int:
        """Extend `lease`. Returns its time to live in seconds, 0 if it has expired. Raises EtcdAway, EtcdRefused."""
        return int(self.call("/v3/lease/keepalive", {"ID": str(lease)}).get("TTL", 0))

    def revoke(self, lease: int) -> None:
        """End `lease` and delete its keys. Raises EtcdAway, EtcdRefused."""
        self.call("/v3/lease/revoke", {"ID": str(lease)})

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request. Raises EtcdAway, EtcdRefused."""
        why, unanswered = "it was not tried", False
        for _ in self._members:
            member = self._members[self._at % len(self._members)]
            try:
                status, answer = self._authenticated_post(member, path, body)
            except (requests.RequestException, ValueError) as error:
                why = f"{member}: {error if type(error) is ValueError else type(error).__name__}"
                unanswered = unanswered or not _unsent(error)
            else:
                if status == 200 and "error" not in answer:
                    return answer.get("result", answer)
                text = str(answer.get("error") or answer.get("message") or status)
                if answer.get("code") in _REFUSED and not unanswered:  # else another member may have carried it out
                    raise EtcdRefused(f"etcd at {member} refused a request: {text}")
                why, unanswered = f"{member}: {text}", True
            self._at += 1
        raise EtcdAway(f"no member of etcd has answered ({why})")

    def _authenticated_post(self, member: str, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """One attempt, with a new token if etcd does not know the old one. Raises as `_post`."""
        if not self._access.user:
            return self._post(member, path, body)
        if self._token:
            status, answer = self._post(member, path, body)
            if answer.get("code") != _UNAUTHENTICATED:
                return status, answer
        credentials = {"name": self._access.user, "password": self._access.password}
        self._token = ""
        status, answer = self._post(member, "/v3/auth/authenticate", credentials)
        if "token" not in answer:
            return status, answer
        self._token = str(answer["token"])
        return self._post(member, path, body)

    def _post(self, member: str, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """One attempt: HTTP status and body. Raises requests.RequestException; ValueError: the body is no JSON."""
        scheme, headers = "http" if self._access.tls is None else "https", {"Authorization": self._token}
        url = f"{scheme}://{member}{path}"
        reply = self._session().post(url, json=body, timeout=self._turn_s, headers=headers if self._token else None)
        try:
            return reply.status_code, reply.json()
        except ValueError:
            raise ValueError(f"HTTP {reply.status_code}: {reply.text[:200].strip()}") from None

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False
            if (tls := self._access.tls) is not None:
                session.verify = tls.ca
                session.cert = (tls.cert, tls.key or tls.cert) if tls.cert else None
        return session


def _unsent(error: Exception) -> bool:
    """No connection was made."""
    return isinstance(getattr(error.args[0] if error.args else None, "reason", None), NewConnectionError)


def put(key: bytes, value: bytes, lease: int = 0) -> dict[str, Any]:
    """An operation of a transaction: set `key`."""
    return {"requestPut": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def delete(first: bytes, end: bytes) -> dict[str, Any]:
    """An operation of a transaction: delete the keys from `first` up to, not including, `end`."""
    return {"requestDeleteRange": {"key": _b64(first), "range_end": _b64(end)}}


def created_at(key: bytes, revision: int) -> dict[str, Any]:
    """A condition of a transaction: `key` was created at `revision` and not deleted since; 0: it does not exist."""
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "createRevision": str(revision)}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _key(fields: Mapping[str, Any]) -> EtcdKey:
    return EtcdKey(
        base64.b64decode(fields["key"]),
        base64.b64decode(fields.get("value", "")),
        int(fields["create_revision"]),
    )


def now() -> float:
    """Seconds that go on while the machine is suspended, as those of a lease do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
