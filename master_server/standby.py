"""A master while another one leads: it waits or follows the journal, answers where the leader is, and takes over."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from dlrover_hooks.config.settings import tls
from dlrover_hooks.config.tls_files import usable
from dlrover_hooks.errors import MasterAway, UsageError
from dlrover_hooks.master.journal.etcd_gateway import EtcdAccess, EtcdGateway
from dlrover_hooks.master.journal.etcd_journal import EtcdJournal, EtcdUrl
from dlrover_hooks.master.journal.etcd_leadership import EtcdLeadership
from dlrover_hooks.master.journal.file_leadership import FileLeadership
from dlrover_hooks.master.journal.journal_protocol import Journal
from dlrover_hooks.master.journal.leadership import Leadership
from dlrover_hooks.master.manifest_storage import HeldUrl, Storage
from dlrover_hooks.protocol import LEADER_HEADER, Manifest, Problem, Retention

log = logging.getLogger("dlrover_hooks.master")
_KEEPALIVE_S = 0.5
"""A member of etcd that does not extend the leader's lease within this time is passed over."""


class StandbyMaster:
    """An ASGI application that becomes the leader's once `lead` was called. Loop."""

    def __init__(self, leader: Callable[[], str]) -> None:
        self._leader = leader
        self._app: ASGIApp | None = None

    def lead(self, app: ASGIApp) -> None:
        """Answer with `app` from now on."""
        self._app = app

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application."""
        if self._app is not None:
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        alive = scope["path"] == "/healthz"
        body = msgspec.json.encode(
            {"status": "ok", "pid": os.getpid(), "role": "standby"} if alive else self._refusal()
        )
        headers = [(b"content-type", b"application/json" if alive else b"application/problem+json")]
        headers.append((LEADER_HEADER.lower().encode(), self._leader().encode()))
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 200 if alive else 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self) -> Problem:
        leader = self._leader()
        return Problem(
            type="MasterAway",
            title="Standby",
            status=503,
            detail=f"This master is a standby; {leader or 'no master'} leads.",
            hint="Give clients the addresses of all masters: DLROVER_HOOKS_MASTER=http://A:8780,http://B:8780.",
        )


class EpochStorage(Storage, Protocol):
    """A storage whose claims have epochs."""

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str, epoch: int = 0) -> HeldUrl:
        """See `Storage`. Raises SaveToBusy if a leader with a higher epoch has claimed `url`."""
        ...


class LeaderStorage:
    """A `Storage` that writes only while this process leads, asked in the thread that writes: it may have waited.

    Claims and manifests carry the leader's epoch.
    """

    def __init__(self, storage: EpochStorage, leadership: Leadership) -> None:
        self._storage, self._leadership = storage, leadership

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """See `Storage`. Raises MasterAway."""
        self._check()
        manifest = msgspec.structs.replace(manifest, epoch=self._leadership.epoch)
        self._storage.commit(url, options, manifest, keep)

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """See `Storage`. Raises MasterAway."""
        self._check()
        self._storage.finish(url, options, job, run, step)

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> HeldUrl:
        """See `Storage`. Raises MasterAway."""
        self._check()
        return self._storage.claim(url, options, job, owner, self._leadership.epoch)

    def _check(self) -> None:
        if not self._leadership.holds():
            raise MasterAway("This master leads no longer.", hint="The next leader writes to storage.")


class LeaderCandidate(Protocol):
    """One process's candidacy and its journal."""

    @property
    def leadership(self) -> Leadership:
        """Its leadership, perhaps of the future."""
        ...

    @property
    def stopping(self) -> threading.Event:
        """Set when this process is to end: it is a candidate no longer."""
        ...

    def elected(self) -> Journal | None:
        """Wait until this process is elected: its journal. None: `stopping` was set. Any thread. Raises HooksError."""
        ...


class FileCandidate:
    """A candidate for the SQLite journal at `path`. It reads the journal only once it leads."""

    def __init__(self, path: str, address: str, *, synchronous: str) -> None:
        self.leadership = FileLeadership(path, address, synchronous=synchronous)
        self.stopping = threading.Event()

    def elected(self) -> Journal | None:
        """See `LeaderCandidate`."""
        return self.leadership.journal if self.leadership.campaign(self.stopping, lambda: None) else None


class EtcdCandidate:
    """A candidate for a journal in etcd, which it follows, so that it leads at once when it is elected.

    A leader that loses its leadership is replaced by a fresh standby in the same process (`exec`): no thread and no
    connection of the former leader is left. The standby inherits the socket that listens, so that no other program can
    take the port. Once `stopping` is set, the process ends instead.
    """

    def __init__(self, url: str, password: str, address: str, listener: socket.socket, ttl_s: int) -> None:
        at = EtcdUrl.parse(url)
        if bool(at.user) != bool(password):
            raise UsageError(
                "a user of etcd needs a password, and a password a user",
                hint="give --journal etcd://USER@HOST:2379/NAME and --etcd-password-file FILE, or neither",
            )
        access = EtcdAccess(usable(tls()) if at.tls else None, at.user, password)
        self._listener = listener
        keeping, key = EtcdGateway(at.members, turn_s=_KEEPALIVE_S, access=access), f"{at.prefix}leader".encode()
        self.leadership = EtcdLeadership(keeping, key, address, self._step_down, ttl_s=ttl_s)
        self.stopping = threading.Event()
        self._journal = EtcdJournal(EtcdGateway(at.members, access=access), at.prefix, self.leadership)
        self._trouble = ""

    def elected(self) -> Journal | None:
        """See `LeaderCandidate`."""
        return self._journal if self.leadership.campaign(self.stopping, self._follow) else None

    def _follow(self) -> None:
        try:
            self._journal.follow()
        except UsageError as error:
            if error.message != self._trouble:
                log.error("this standby cannot follow: %s", error)
            self._trouble = error.message

    def _step_down(self) -> None:
        if self.stopping.is_set():
            return
        log.warning("this master leads no longer: it goes on as a standby")
        for handler in logging.getLogger().handlers:
            handler.flush()
        try:
            self._listener.set_inheritable(True)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--fd", str(self._listener.fileno())])
        except OSError as error:
            log.critical("no standby can be started in this process: %s", error)
            os._exit(70)


def is_etcd(journal: str | None) -> bool:
    """`--journal` names etcd."""
    return journal is not None and journal.startswith(("etcd://", "etcds://"))


def advertised(given: str | None, address: str) -> str:
    """The URL under which clients reach the master that listens at `address`. Raises UsageError if it is unknown."""
    if given:
        return given.rstrip("/")
    if urlsplit(address).hostname in ("0.0.0.0", "::"):
        raise UsageError(
            "--host is a wildcard, so the other masters do not learn this one's address",
            hint="add --advertise http://HOST:PORT, as clients reach this master",
        )
    return address
