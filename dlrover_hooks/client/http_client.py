"""The master's HTTP client: one `call(request) -> reply` for every row of `ROUTES`.

Events carry an idempotency key: an unanswered call is sent again with the same key until its deadline. Threads may
share a client. A forked child may keep using it: the client opens new connections there.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import random
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import requests
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from dlrover_hooks import config as settings
from dlrover_hooks.client.liveness_connection import MasterAddress, Watcher
from dlrover_hooks.client.master_addresses import MasterAddresses
from dlrover_hooks.config import Tls
from dlrover_hooks.config.tls_files import usable
from dlrover_hooks.errors import HooksError, JournalFailed, MasterAway, MasterError, UsageError, named
from dlrover_hooks.protocol import LEADER_HEADER, PROTOCOL, Message, Notice, Problem, Route, Routes

log = logging.getLogger("dlrover_hooks")

_AGAIN = (502, 503, 504)
_SILENT_S = 3.0
_TURN_S = 2.0
"""Of several masters one that does not answer for so long is passed over: its process may be stopped."""
_LONGEST_POLL_S = 3.0
"""Of several masters each is asked to answer a long-poll within so long: one that is stopped is passed over `_TURN_S`
later. 1000 waiting clients then send 333 requests per second, for which a master needs a tenth of one core."""
_LONGEST_PAUSE_S, _LONGEST_PAUSE_OF_SEVERAL_S = 1.0, 0.5
"""Between two attempts. A standby takes over within seconds, a single master is started again."""
_HINT = "Is it running and reachable from here? Set DLROVER_HOOKS_MASTER to its address."


class Caller(Protocol):
    """A `MasterClient`, or the master's core in this process (`InProcessMaster`)."""

    def call(
        self, request: Message, *, channel: str = "main", timeout_s: float | None = None, again: bool = True
    ) -> Message: ...


class MasterClient:
    """Calls the master at `url` as `incarnation`.

    Args:
        url: such as `http://127.0.0.1:8780`; those of several masters are separated by commas. A master that does not
            lead names the leader, which is asked next.
        token: bearer token, if the master requires one.
        incarnation: identifies this process lifetime; part of every idempotency key.
        deadline_s: how long a call is repeated before it fails.
        tls: for https; by default from the environment, see `config.tls`.

    Raises:
        UsageError: a file of `tls` cannot be used, or some addresses are https and others are not.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        incarnation: str,
        deadline_s: float = 60.0,
        tls: Tls | None = None,
    ) -> None:
        self.url, self.incarnation, self.deadline_s = url.rstrip("/"), incarnation, deadline_s
        self._addresses = MasterAddresses(url)
        self._tls = usable(tls or settings.tls()) if url.startswith("https:") else None
        self._headers = {"X-Dlrover-Hooks-Protocol": str(PROTOCOL), "Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._met = False
        """A master has answered before. A non-master answer after that is a fault on the route and is retried."""
        self._silent_since: float | None = None
        """Monotonic time of the first failed call, while no master has answered yet."""
        self._seqs: collections.Counter[str] = collections.Counter()
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self.renew()
        _CLIENTS.add(self)

    def renew(self) -> None:
        """Resets locks and connections. Also called in a forked child, which must not use those of the parent."""
        self._addresses.renew()
        self._guard = threading.Lock()
        self._channels: dict[str, threading.Lock] = {}
        self._local = threading.local()
        self._sessions: weakref.WeakSet[requests.Session] = weakref.WeakSet()
        self._closed = threading.Event()

    def key(self, channel: str) -> str:
        """The next idempotency key of `channel`, for an event that may need several calls."""
        with self._channel(channel):
            self._seqs[channel] += 1
            return f"{self.incarnation}/{channel}/{self._seqs[channel]}"

    def call(
        self,
        request: Message,
        *,
        channel: str = "main",
        timeout_s: float | None = None,
        again: bool = True,
        key: str | None = None,
    ) -> Any:
        """Send `request`, return the reply of its route's type. Any thread; events of one channel are sent in order.

        Args:
            request: a request type of `ROUTES`. A long-poll may be answered that there is nothing before its own
                timeout: its caller asks again.
            channel: events of one channel wait for each other.
            timeout_s: overrides `deadline_s`.
            again: False raises MasterAway at the first failure instead of retrying until the deadline.
            key: the key of an event that an earlier call sent without receiving an answer, see `key`.

        Raises:
            UsageError: no master has answered yet, and TLS fails: the certificate, its host name, or no TLS on that
                port.
            MasterAway: no answer in time. The event may or may not have been applied.
            MasterError: the master refused the request; the class is the one named in the reply, see `errors`.
        """
        row = Routes.by_request[type(request)]
        until = time.monotonic() + (self.deadline_s if timeout_s is None else timeout_s)
        if not row.event:
            return self._send(row, request, until, {}, again=again)
        if key is not None:
            return self._send(row, request, until, {"Idempotency-Key": key}, again=again, unknown=True)
        with self._channel(channel):
            self._seqs[channel] += 1
            key = f"{self.incarnation}/{channel}/{self._seqs[channel]}"
            return self._send(row, request, until, {"Idempotency-Key": key}, again=again)

    def watch(
        self,
        job: str,
        on_notice: Callable[[Notice], None],
        on_error: Callable[[MasterError], None] | None = None,
        on_failure: Callable[[HooksError], object] | None = None,
    ) -> Watcher:
        """Keep the liveness connection open from a daemon thread, across restarts of the master, until closed.

        That thread calls `on_notice` once for each broken round and for the end of the job. It calls `on_error` if the
        master refuses this incarnation because it was declared dead; the watch then ends. It calls `on_failure` with an
        unexpected error, also one of a callback, and goes on.
        """
        wire = MasterAddress(addresses=self._addresses, headers=dict(self._headers), tls=self._tls)
        watcher = Watcher(wire, job, self.incarnation, on_notice, on_error, on_failure)
        self._watchers.add(watcher)
        return watcher

    def close(self) -> None:
        """End watches and connections. Idempotent."""
        self._closed.set()
        for watcher in list(self._watchers):
            watcher.close()
        with self._guard:
            for session in list(self._sessions):
                session.close()

    # ---- one call ----------------------------------------------------------------------------------------------------

    def _channel(self, name: str) -> threading.Lock:
        with self._guard:
            return self._channels.setdefault(name, threading.Lock())

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.headers.update(self._headers)
            if self._tls is not None:
                session.verify = self._tls.ca
                session.cert = (self._tls.cert, self._tls.key or self._tls.cert) if self._tls.cert else None
            session.trust_env = False  # no proxies and no netrc between a worker and its master
            with self._guard:
                self._sessions.add(session)
        return session

    def _send(
        self, row: Route, request: Message, until: float, headers: dict[str, str], *, again: bool, unknown: bool = False
    ) -> Any:
        """`unknown`: an earlier attempt may have been carried out, or may still be."""
        pause_s, why, reached = 0.05, "it was not tried", False
        while (left := until - time.monotonic()) > 0:
            url, leader, silent = self._addresses.current, "", False
            try:
                response = self._exchange(url, row, request, left, headers)
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
                if not self._met and (fault := _tls_fault(error)) is not None:
                    raise UsageError(f"The master at {self.url} is not to be trusted: {fault}.", hint=_TLS) from None
                why, sent = type(error).__name__, not _unconnected(error)
                reached, unknown, silent = reached or sent, unknown or sent, isinstance(error, requests.Timeout)
            else:
                reached = True
                try:
                    reply = _reply(row, response)
                except _Foreign as foreign:  # a proxy's page on the way to a master that has answered before
                    if not self._met:
                        raise MasterError(foreign.message, hint=_HINT) from None
                    why, unknown = foreign.message, True
                else:
                    self._met = True
                    if not isinstance(reply, HooksError):
                        return reply
                    refused = isinstance(reply, JournalFailed) and not unknown
                    if response.status_code not in _AGAIN or refused:
                        raise reply
                    leader = response.headers.get(LEADER_HEADER, "")
                    unknown = unknown or LEADER_HEADER not in response.headers
                    why = f"it answered {response.status_code}: {reply.message}"
            if self._addresses.failed(url, leader, silent=silent):
                for watcher in list(self._watchers):
                    watcher.moved()
            self._say_silence(why)
            if not again or self._closed.wait(
                min(max(0.0, until - time.monotonic()), pause_s * random.uniform(0.5, 1.0))
            ):
                break
            pause_s = min(_LONGEST_PAUSE_OF_SEVERAL_S if self._addresses.several else _LONGEST_PAUSE_S, 2 * pause_s)
        raise self._away(request, why, reached=reached)

    def _away(self, request: Message, why: str, *, reached: bool) -> MasterAway:
        away = MasterAway(
            f"The master at {self.url} gave no answer to {type(request).__name__} in time ({why}).",
            hint=_HINT if self._met or self._tls is None else f"{_HINT} {_TLS}",
        )
        away.reached = reached
        return away

    def _say_silence(self, why: str) -> None:
        """Logs one warning if no master has answered for 3 s since the first call: the address may be wrong."""
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if not self._met and now > self._silent_since + _SILENT_S:
            self._silent_since = math.inf
            log.warning("no master has answered at %s yet (%s); trying on. %s", self.url, why, _HINT)

    def _exchange(
        self, url: str, row: Route, request: Message, left: float, headers: dict[str, str]
    ) -> requests.Response:
        path, query, body, waits_s = row.path, None, None, 0.0
        if row.in_url:
            fields = {name: str(value) for name, value in msgspec.to_builtins(request).items()}
            query = {name: value for name, value in fields.items() if f"{{{name}}}" not in path}
            path = path.format_map({name: quote(value, safe="") for name, value in fields.items()})
        else:
            longest_s = _LONGEST_POLL_S if self._addresses.several else math.inf
            sent = _within(request, left, longest_s) if row.waits else request
            body, waits_s = msgspec.json.encode(sent), getattr(sent, "timeout_s", 0.0) if row.waits else 0.0
        return self._session().request(
            row.method,
            url + path,
            params=query,
            data=body,
            headers=headers,
            timeout=(max(0.05, min(left, 5.0)), min(left, waits_s + _TURN_S) if self._addresses.several else left),
            allow_redirects=False,
        )


def _unconnected(error: requests.RequestException) -> bool:
    """Nothing was sent: the connection was never established."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(reason, (NewConnectionError, ConnectTimeoutError))


def _tls_fault(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error behind `error`; None without one, or if the connection just ended, which may be transient."""
    while error is not None:
        cause = error.args[0] if error.args and isinstance(error.args[0], BaseException) else error
        if isinstance(cause, ssl.SSLError):
            return None if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)) else cause
        error = error.__cause__ or error.__context__
    return None


_TLS = (
    "Set DLROVER_HOOKS_CA_FILE to a file with the certificate of the CA that signed the master's (or with the master's "
    "own), use the name in it as the host, and set DLROVER_HOOKS_CLIENT_CERT if the master asks for a certificate."
)


def _within(request: Message, left: float, longest_s: float = math.inf) -> Message:
    """Limits a long-poll's timeout, also so that its answer arrives before the caller's deadline."""
    timeout_s = getattr(request, "timeout_s", None)
    if timeout_s is None:
        return request
    return msgspec.structs.replace(request, timeout_s=min(timeout_s, longest_s, 0.8 * left))


class _Foreign(HooksError):
    """The answer does not come from a dlrover-hooks master."""


def _reply(row: Route, response: requests.Response) -> Any:
    """The reply, or the error that a problem+json body names. Raises _Foreign."""
    try:
        if response.status_code < 300:
            return msgspec.json.decode(response.content, type=row.reply)
        problem = msgspec.json.decode(response.content, type=Problem)
    except msgspec.DecodeError:
        if response.status_code in _AGAIN:
            return MasterError(f"HTTP {response.status_code} from {response.url}")
        to = f" (a redirect to {response.headers['Location']})" if response.is_redirect else ""
        raise _Foreign(
            f"HTTP {response.status_code}{to} from {response.url}: the answer is not a dlrover-hooks master's."
        ) from None
    error = named(problem.type)(problem.detail, hint=problem.hint)
    error.status = problem.status
    return error


_CLIENTS: weakref.WeakSet[MasterClient] = weakref.WeakSet()


def _renew_in_child() -> None:
    for client in list(_CLIENTS):
        client.renew()


os.register_at_fork(after_in_child=_renew_in_child)
