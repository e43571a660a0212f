"""One live job per checkpoint URL: the claim on `save_to` (DL-90).

Locally a lock of the open file (`flock`): it ends with its process, however that ends; a forked child closes its copy
at once. A POSIX record lock would not do: it falls as soon as this process closes *any* descriptor of the file, as a
copy of the tree does.

Elsewhere a lease file, refreshed every 20 s by a small thread and void after 60 s. Who was stopped for longer than that
and was succeeded finds the other's name there: it writes there no more, and `still_held` says so before each commit.
Between that look and the write a moment passes in which it could happen: stores have no locks. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from dlrover_hooks.checkpoint.storage import mounts
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder, failures
from dlrover_hooks.checkpoint.storage.mounts import LOCK as LOCK
from dlrover_hooks.errors import SaveToBusy, StorageFailed
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.protocol import Message

LEASE = "owner.json"
KEEPER = "keeper"
"""How the name of an owner begins that holds the claim for a moment only, to commit what a dead trainer left."""
_LEASE_S, _REFRESH_S = 60.0, 20.0
_KEEPER_S, _POLL_S, _TORN_S = 10.0, 0.05, 2.0
_log = logging.getLogger(__name__)


class Owner(Message, frozen=True):
    """Who holds a checkpoint URL. `expires` is Unix time, 0 where a lock does the work."""

    job: str
    owner: str
    expires: float = 0.0
    life: str = ""
    """Of the claim: the same owner's next one has another."""


class UrlClaim:
    """`job`'s hold on a checkpoint URL, until `release` or the end of the process. Any thread."""

    _mine: ClassVar[dict[str, UrlClaim]] = {}
    """Claims of this process by URL."""
    _locks: ClassVar[dict[str, threading.Lock]] = {}
    """By URL: where one store hangs, the claims on others go on."""

    def __init__(self, place: StorageFolder, who: Owner) -> None:
        self.place, self.who = place, msgspec.structs.replace(who, life=uuid.uuid4().hex)
        self._here = ForkGuard()
        self._count = 1
        self._fd = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def take(cls, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> UrlClaim:
        """Claim `url` for `job`; `owner` is shown to whoever is refused. Again for the same job: the same claim.

        Raises:
            SaveToBusy: another live process, or another job of this one, holds it.
            StorageFailed: the folder cannot be written.
        """
        place = StorageFolder(url, options)
        with cls._locks.setdefault(place.url, threading.Lock()):
            mine = cls._mine.get(place.url)
            if mine is not None:
                if mine.who.job != job:
                    raise _busy(place, mine.who)
                mine._count += 1
                return mine
            claim = cls(place, Owner(job=job, owner=owner))
            claim._take()
            cls._mine[place.url] = claim
            return claim

    def release(self) -> None:
        """Give the URL up (the last of several takes does it). Idempotent; nothing in a forked child."""
        if not self._here:
            return
        with self._locks[self.place.url]:
            self._count -= 1
            if self._count != 0:
                return
            self._mine.pop(self.place.url, None)
            if self.place.local:
                try:
                    self.place.remove(LEASE)
                finally:  # the lock file stays: removing it would let two processes lock two files
                    os.close(self._fd)
            else:
                self._end_lease()

    @classmethod
    def _forked(cls) -> None:
        """In a forked child: nothing is claimed here, and no lock outlives the parent because of it."""
        for claim in cls._mine.values():
            if claim._fd >= 0:
                os.close(claim._fd)
        cls._mine.clear()
        cls._locks.clear()

    def _take(self) -> None:
        """A keeper of the same job is waited for."""
        until = time.monotonic() + _KEEPER_S
        while True:
            try:
                return self._lock() if self.place.local else self._lease()
            except SaveToBusy:
                held = read_owner(self.place)
                keeper = held is None or (held.job == self.who.job and held.owner.startswith(KEEPER))
                if not keeper or time.monotonic() > until:
                    raise
                time.sleep(_POLL_S)

    def _lock(self) -> None:
        mounts.demand_same(self.place)
        self.place.make()
        with failures(f"claim {self.place.url}"):
            fd = os.open(self.place.path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if isinstance(error, (BlockingIOError, PermissionError)):
                    raise _busy(self.place, read_owner(self.place)) from None
                raise
        try:
            with failures(f"claim {self.place.url}"):
                mounts.give_name(fd)
            mounts.demand_same(self.place)  # remembers the name
            self.place.put(LEASE, msgspec.json.encode(self.who))
        except BaseException:
            os.close(fd)  # or the lock would be held until this process ends, by a claim that nobody can release
            raise
        self._fd = fd

    def _lease(self) -> None:
        held = read_owner(self.place)
        if held is not None and held.expires > time.time() and held.owner != self.who.owner:
            raise _busy(self.place, held)
        self.place.make()
        if held is not None:
            self.place.put(LEASE, self._fresh())
        elif not self.place.put_new(LEASE, self._fresh()):
            raise _busy(self.place, read_owner(self.place))
        self._thread = threading.Thread(target=self._keep_fresh, name="dlrover-hooks-claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise SaveToBusy if the lease had run out and somebody else has the URL now. Where a lock does it: never."""
        if self.place.local:
            return
        until, held = time.monotonic() + _TORN_S, read_owner(self.place)
        while held is None and self.place.read(LEASE) is not None:  # somebody writes it, where that is not atomic
            if time.monotonic() > until:
                raise _busy(self.place, None)
            time.sleep(_POLL_S)
            held = read_owner(self.place)
        if held is not None and held.life != self.who.life:
            raise _busy(self.place, held)

    def _fresh(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self.who, expires=time.time() + _LEASE_S))

    def _keep_fresh(self) -> None:
        while not self._stop.wait(_REFRESH_S):
            try:
                self.check()
                self.place.put(LEASE, self._fresh())
            except SaveToBusy as lost:
                _log.error("job %s: nothing is committed to it any more: %s", self.who.job, lost)
                return
            except StorageFailed as error:
                _log.warning("job %s: the claim on %s was not refreshed: %s", self.who.job, self.place.url, error)

    def _end_lease(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
        with contextlib.suppress(SaveToBusy):
            self.check()
            self.place.remove(LEASE)


os.register_at_fork(after_in_child=UrlClaim._forked)  # pyright: ignore[reportPrivateUsage]


def still_held(url: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise SaveToBusy if this process claimed `url` and somebody else has it by now. Without a claim: nothing."""
    mine = UrlClaim._mine.get(StorageFolder(url, options).url)  # pyright: ignore[reportPrivateUsage]
    if mine is not None:
        mine.check()


def holder(url: str, options: Mapping[str, Any] | None = None) -> Owner | None:
    """Who says to hold `url`; of value only after `take` was refused."""
    return read_owner(StorageFolder(url, options))


def read_owner(place: StorageFolder) -> Owner | None:
    """The owner file at `place`; None if there is none or it is damaged."""
    data = place.read(LEASE)
    try:
        return msgspec.json.decode(data, type=Owner) if data else None
    except msgspec.DecodeError:
        return None


def _busy(place: StorageFolder, holder: Owner | None) -> SaveToBusy:
    who = f"job {holder.job!r} ({holder.owner})" if holder else "another process"
    return SaveToBusy(
        f"{place.url} belongs to {who}, which is alive",
        hint="give each job a `save_to` of its own, or end the other one first",
    )
