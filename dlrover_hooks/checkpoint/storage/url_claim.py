"""One live job per checkpoint URL: the claim on `save_to`.

Locally it is a lock of the open file (`flock`). It ends with its process, however that ends; a forked child closes its
copy at once. A POSIX record lock is not usable: it is released when this process closes *any* descriptor of the file,
as a copy of the tree does.

Elsewhere it is a lease file, which a thread refreshes every 20 s and which expires after 60 s. A process that was
stopped for longer and replaced finds the other owner there: it stops writing, and `still_held` raises before each
commit. Stores have no locks, so an owner can still change between that check and the write. Of several masters with one
journal, the one with the higher epoch keeps the lease, even if a former leader overwrites it late. No torch.
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
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.protocol import Count, Message

LEASE = "owner.json"
KEEPER = "keeper"
"""Prefix of an owner that holds the claim only briefly, to commit what a dead trainer left."""
_LEASE_S, _REFRESH_S = 60.0, 20.0
_KEEPER_S, _POLL_S, _TORN_S = 10.0, 0.05, 2.0
_log = logging.getLogger(__name__)


class Owner(Message, frozen=True):
    """The holder of a checkpoint URL. `expires` is Unix time, 0 for a local lock."""

    job: str
    owner: str
    expires: float = 0.0
    life: str = ""
    """Identifies the claim: the same owner's next claim has another one."""
    epoch: Count = 0
    """Of the leader, where several masters are one owner; 0 otherwise."""


class UrlClaim:
    """`job`'s claim on a checkpoint URL, until `release` or the end of the process. Any thread."""

    _mine: ClassVar[dict[str, UrlClaim]] = {}
    """Claims of this process by URL."""
    _locks: ClassVar[dict[str, threading.Lock]] = {}
    """By URL: while one store hangs, claims on others continue."""

    def __init__(self, place: StorageFolder, owner: Owner) -> None:
        self.place, self.owner = place, msgspec.structs.replace(owner, life=uuid.uuid4().hex)
        self._here = ForkGuard()
        self._count = 1
        self._fd = -1
        self._thread = BackgroundThread(
            "dlrover-hooks-claim",
            self._keep_fresh,
            where=f"job {owner.job}, the claim on {place.url}",
            kind=StorageFailed,
            again_s=0.0,  # `_keep_fresh` begins with a pause
        )

    @classmethod
    def take(cls, url: str, options: Mapping[str, Any] | None, job: str, owner: str, epoch: int = 0) -> UrlClaim:
        """Claim `url` for `job`; `owner` is shown to refused claimants. Again for the same job: the same claim.

        The claim of the same owner is replaced, unless that one has a higher `epoch`.

        Raises:
            SaveToBusy: another live process, or another job of this one, holds it.
            StorageFailed: the folder cannot be written.
        """
        place = StorageFolder(url, options)
        with cls._locks.setdefault(place.url, threading.Lock()):
            mine = cls._mine.get(place.url)
            if mine is not None:
                if mine.owner.job != job:
                    raise _busy(place, mine.owner)
                mine._count += 1
                return mine
            claim = cls(place, Owner(job=job, owner=owner, epoch=epoch))
            claim._take()
            cls._mine[place.url] = claim
            return claim

    def release(self) -> None:
        """Release the URL; the last of several takes does it. Idempotent; does nothing in a forked child."""
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
        """In a forked child: drop all claims, and close the locks so that they do not outlive the parent."""
        for claim in cls._mine.values():
            if claim._fd >= 0:
                os.close(claim._fd)
        cls._mine.clear()
        cls._locks.clear()

    def _take(self) -> None:
        """Waits for a keeper of the same job, which holds a claim only briefly."""
        until = time.monotonic() + _KEEPER_S
        while True:
            try:
                return self._lock() if self.place.local else self._lease()
            except SaveToBusy:
                held = read_owner(self.place)
                keeper = held is None or (held.job == self.owner.job and held.owner.startswith(KEEPER))
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
            mounts.demand_same(self.place)  # records the name
            self.place.put(LEASE, msgspec.json.encode(self.owner))
        except BaseException:
            os.close(fd)  # otherwise the lock would be held until this process ends, without a claim to release
            raise
        self._fd = fd

    def _lease(self) -> None:
        held = read_owner(self.place)
        other = held is not None and (held.owner != self.owner.owner or held.epoch > self.owner.epoch)
        if held is not None and other and held.expires > time.time():
            raise _busy(self.place, held)
        self.place.make()
        if held is not None:
            self.place.put(LEASE, self._fresh())
        elif not self.place.put_new(LEASE, self._fresh()):
            raise _busy(self.place, read_owner(self.place))
        self._thread.start()

    def check(self) -> None:
        """Does nothing for a local lock.

        Raises:
            SaveToBusy: the lease expired, and another owner has the URL now.
            StorageFailed: the last refresh failed by an error in this program.
        """
        self._thread.check()
        self._look()

    def _look(self) -> None:
        if self.place.local:
            return
        until, held = time.monotonic() + _TORN_S, read_owner(self.place)
        while held is None and self.place.read(LEASE) is not None:  # it is being written, not atomically
            if time.monotonic() > until:
                raise _busy(self.place, None)
            time.sleep(_POLL_S)
            held = read_owner(self.place)
        if held is None or held.life == self.owner.life:
            return
        if held.owner != self.owner.owner or held.epoch >= self.owner.epoch:
            raise _busy(self.place, held)
        self.place.put(LEASE, self._fresh())  # a former leader was stopped between its look and its write

    def _fresh(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self.owner, expires=time.time() + _LEASE_S))

    def _keep_fresh(self) -> None:
        while not self._thread.stopping.wait(_REFRESH_S):
            try:
                self._look()
                self.place.put(LEASE, self._fresh())
            except SaveToBusy as lost:
                _log.error("job %s: nothing is committed to it any more: %s", self.owner.job, lost)
                return
            except StorageFailed as error:
                _log.warning("job %s: the claim on %s was not refreshed: %s", self.owner.job, self.place.url, error)

    def _end_lease(self) -> None:
        self._thread.stop()
        with contextlib.suppress(SaveToBusy):
            self._look()
            self.place.remove(LEASE)


os.register_at_fork(after_in_child=UrlClaim._forked)  # pyright: ignore[reportPrivateUsage]


def still_held(url: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise SaveToBusy if this process claimed `url` and another owner has it now. Does nothing without a claim."""
    mine = UrlClaim._mine.get(StorageFolder(url, options).url)  # pyright: ignore[reportPrivateUsage]
    if mine is not None:
        mine.check()


def holder(url: str, options: Mapping[str, Any] | None = None) -> Owner | None:
    """The owner recorded at `url`; only valid after `take` was refused."""
    return read_owner(StorageFolder(url, options))


def read_owner(place: StorageFolder) -> Owner | None:
    """The owner file at `place`; None if there is none or it is damaged."""
    data = place.read(LEASE)
    try:
        return msgspec.json.decode(data, type=Owner) if data else None
    except msgspec.DecodeError:
        return None


def _busy(place: StorageFolder, holder: Owner | None) -> SaveToBusy:
    owner = f"job {holder.job!r} ({holder.owner})" if holder else "another process"
    return SaveToBusy(
        f"{place.url} belongs to {owner}, which is alive",
        hint="give each job a `save_to` of its own, or end the other one first",
    )
