"""The journal in etcd, for several masters of which one leads (`EtcdLeadership`).

Keys below the journal's prefix: `owner`, `leader`, `probe`, `events/SEQ/PART`, `snapshots/SEQ/PART`. A batch of events
is one value, as is a snapshot; `SEQ` is the number of its first event (of a snapshot: of the last event in it). etcd
refuses requests of more than 1.5 MiB, so a long value has several parts. Part 0, which says how many there are, is
written last: a value without it does not exist. Each write has the leader's epoch as its condition.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from dlrover_hooks.errors import JournalFailed, UsageError
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal.etcd_gateway import (
    EtcdAway,
    EtcdGateway,
    EtcdKey,
    EtcdRefused,
    created_at,
    delete,
    put,
)
from dlrover_hooks.master.journal.etcd_leadership import EtcdLeadership
from dlrover_hooks.master.journal.journal_protocol import LeadershipLost, checksum, replay

log = logging.getLogger("dlrover_hooks.master")
FORMAT = 1
"""Version of keys and values. A release reads its own format and older ones."""
PART_BYTES = 2**20
_AGAIN_S = 0.05
"""Pause before a write without an answer is repeated."""
Operation = dict[str, Any]


class ValueHead(msgspec.Struct, frozen=True):
    """First line of part 0: the number of parts and the checksum of the whole value."""

    parts: int
    crc: int


class EtcdJournal:
    """A `Journal` below `prefix`. The elected leader calls `load`, `append` and `probe`; a standby calls `follow`."""

    def __init__(self, etcd: EtcdGateway, prefix: str, leadership: EtcdLeadership) -> None:
        self.name = f"etcd:{prefix}"
        self.since_snapshot = 0
        self._etcd, self._prefix, self._leadership = etcd, prefix.encode(), leadership
        self._last = self._sound = 0
        self._replica: Replica | None = None
        self._owner = ""
        """Read at the first contact: etcd may be away when this process starts."""

    def _identify(self) -> str:
        key, mine = self._prefix + b"owner", {"format": FORMAT, "owner": uuid.uuid4().hex}
        self._etcd.transaction([created_at(key, 0)], [put(key, msgspec.json.encode(mine))])
        found = self._etcd.get(key)
        if found is None:
            raise EtcdRefused(f"{self.name}: the key of its owner vanished", hint="does another program delete it?")
        said = msgspec.json.decode(found.value)
        if said["format"] > FORMAT:
            raise UsageError(
                f"The journal {self.name} has format {said['format']}, this release reads formats up to {FORMAT}.",
                hint="Serve it with the release that wrote it, or give another name in --journal.",
            )
        return str(said["owner"])

    @property
    def claims_as(self) -> str:
        """See `Journal`."""
        return f"the masters of {self.name} ({self._owner})"

    def follow(self) -> None:
        """Read what the leader has written since the last call. Raises EtcdAway, EtcdRefused, UsageError.

        UsageError: a part is damaged, or the journal has a newer format.
        """
        self._owner = self._owner or self._identify()
        if self._replica is None:
            self._replica = Replica(self._etcd, self._prefix, self.name)
        self._replica.catch_up()

    def load(self) -> Master:
        """See `Journal`. The state that was followed is used up by it."""
        try:
            self._insist(self.follow)
            assert self._replica is not None
            self._last, self._sound = self._replica.last, self._replica.snapshot
            self.since_snapshot = self._last - self._sound
            return self._replica.state
        finally:
            self._replica = None

    def append(self, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        """See `Journal`."""
        batch = list(records)
        last = self._last + len(batch)
        if batch:
            self._write(b"events/", self._last + 1, msgspec.msgpack.encode(batch))
        self._last = last
        self.since_snapshot += len(batch)
        if snapshot is not None:
            self._replace(last, snapshot)

    def probe(self) -> None:
        """See `Journal`."""
        self._fenced([put(self._prefix + b"probe", uuid.uuid4().hex.encode())])

    def close(self) -> None:
        """See `Journal`: the next leader may begin at once."""
        self._leadership.resign()

    # ---- writes -----------------------------------------------------------------------------------------------------

    def _replace(self, last: int, snapshot: bytes) -> None:
        """Store a snapshot and drop what it makes unnecessary. The one before is kept, and the events since that one.

        The events are stored already: without the snapshot the journal is only longer.
        """
        folder, sound = self._prefix + b"snapshots/", self._sound
        try:
            self._write(b"snapshots/", last, snapshot)
            self._fenced(
                [
                    delete(self._prefix + b"events/", self._prefix + b"events/" + _number(sound + 1)),
                    delete(folder, folder + _number(sound)),
                    delete(folder + _number(sound + 1), folder + _number(last)),
                ]
            )
        except JournalFailed as error:
            log.warning("journal %s: no snapshot is stored: %s", self.name, error)
        else:
            self._sound, self.since_snapshot = last, 0

    def _write(self, folder: bytes, number: int, value: bytes) -> None:
        parts = [value[at : at + PART_BYTES] for at in range(0, len(value), PART_BYTES)] or [b""]
        head = msgspec.json.encode(ValueHead(parts=len(parts), crc=checksum(number, value)))
        key = self._prefix + folder + _number(number)
        for part in range(len(parts) - 1, 0, -1):
            self._fenced([put(key + _part(part), parts[part])])
        self._fenced([put(key + _part(0), head + b"\n" + parts[0])])

    def _fenced(self, operations: list[Operation]) -> None:
        """Do `operations` if this process still leads. Raises JournalFailed: nothing was done; LeadershipLost."""
        done = False

        def attempt() -> None:
            nonlocal done
            done = self._etcd.transaction([created_at(self._leadership.key, self._leadership.epoch)], operations)

        self._insist(attempt)
        if not done:
            raise self._lost("another master leads: nothing was written")

    def _insist(self, work: Callable[[], None]) -> None:
        """Do `work`, again and again while etcd does not answer, as long as this process leads."""
        unanswered = False
        while self._leadership.holds():
            try:
                return work()
            except EtcdAway:
                unanswered = True
                self._leadership.pause(_AGAIN_S)
            except EtcdRefused as error:
                if unanswered:
                    raise self._lost("etcd refuses to repeat a write that it may have stored") from error
                raise JournalFailed(
                    f"The journal {self.name} cannot be written: {error.message}. Nothing was changed.",
                    hint="Is etcd's disk or its quota full? See etcdctl endpoint status and alarm list.",
                ) from error
        raise self._lost("etcd has not confirmed this master's leadership in time")

    def _lost(self, why: str) -> LeadershipLost:
        """Give the leadership up: this process's state may differ from the journal."""
        self._leadership.give_up()
        return LeadershipLost(why)


class Replica:
    """The state after all events that were read so far. Not thread-safe."""

    def __init__(self, etcd: EtcdGateway, prefix: bytes, name: str) -> None:
        self.state, self.last, self.snapshot = Master(), 0, 0
        """The state, the number of the last event in it, and that of the snapshot on which it rests."""
        self._etcd, self._prefix, self._name = etcd, prefix, name

    def catch_up(self) -> None:
        """Apply the events since the last call. Raises EtcdAway, EtcdRefused, UsageError (damage)."""
        while (gap := self._read_on()) is not None:
            if not (newest := self._numbers(b"snapshots/")) or newest[-1] <= self.last:
                raise self._damaged(f"event {self.last + 1}: it is missing, the next one is {gap}")

    def _read_on(self) -> int | None:
        """Read the newest snapshot if it is ahead, and the events. Returns the number of an event that follows a gap.

        A gap is no damage if a snapshot was stored between the two reads.
        """
        newest = self._numbers(b"snapshots/")
        if newest and newest[-1] > self.last:  # events up to there may be gone
            self.state, self.snapshot = self._restored(newest)
            self.last = self.snapshot
        elif newest:
            self.snapshot = newest[-1]
        folder = self._prefix + b"events/"
        for number, value in self._values(folder, self._etcd.range(folder + _number(self.last + 1), _end(folder))):
            if number != self.last + 1:
                return number
            for record in msgspec.msgpack.decode(value, type=list[bytes]):
                self.last += 1
                replay(self._name, self.state, self.last, record)
        return None

    def _numbers(self, folder: bytes) -> list[int]:
        first = self._prefix + folder
        found = self._etcd.range(first, _end(first), keys_only=True)
        return [number for number, part in (_place(one.key) for one in found) if part == 0]

    def _restored(self, numbers: list[int]) -> tuple[Master, int]:
        """The newest undamaged snapshot and its number."""
        folder, bad = self._prefix + b"snapshots/", ""
        for number in reversed(numbers):
            key = folder + _number(number)
            try:
                for _, value in self._values(folder, self._etcd.range(key, _end(key))):
                    return job_registry.decode(value), number
            except (UsageError, msgspec.MsgspecError) as error:
                bad = bad or str(error)
        raise self._damaged(f"its snapshots: {bad or 'they vanished while they were read'}")

    def _values(self, folder: bytes, keys: list[EtcdKey]) -> Iterable[tuple[int, bytes]]:
        """Number and value of each value among `keys` that has all of its parts."""
        parts: dict[int, dict[int, bytes]] = {}
        for one in keys:
            number, part = _place(one.key)
            parts.setdefault(number, {})[part] = one.value
        for number, found in sorted(parts.items()):
            if 0 not in found:  # a leader ended before it was complete
                continue
            line, _, first = found[0].partition(b"\n")
            try:
                head = msgspec.json.decode(line, type=ValueHead)
                value = b"".join([first, *(found[part] for part in range(1, head.parts))])
            except (msgspec.MsgspecError, KeyError) as error:
                raise self._damaged(f"{folder.decode()}{number}: {type(error).__name__}: {error}") from error
            if checksum(number, value) != head.crc:
                raise self._damaged(f"{folder.decode()}{number}: it does not match its checksum")
            yield number, value

    def _damaged(self, what: str) -> UsageError:
        return UsageError(
            f"The journal {self._name} cannot be read: {what}.",
            hint="etcd is left as it is. Restore a snapshot of etcd, or give another name in --journal: jobs that are "
            "launched again resume from their checkpoints.",
        )


class EtcdUrl(NamedTuple):
    """`etcd://USER@HOST:PORT,HOST:PORT/NAME`; `etcds://` with TLS. `prefix`: of the keys of the journal NAME."""

    members: tuple[str, ...]
    prefix: str
    tls: bool
    user: str

    @classmethod
    def parse(cls, url: str) -> EtcdUrl:
        """Raises UsageError."""
        scheme, _, rest = url.partition("://")
        hosts, _, name = rest.partition("/")
        user, _, hosts = hosts.rpartition("@")
        members = tuple(one if ":" in one else f"{one}:2379" for one in hosts.split(",") if one)
        if not members or "?" in url or ":" in user:
            raise UsageError(
                f"--journal {scheme}://... names no members of etcd, or holds more than members, a user and a name",
                hint="write etcd://HOST:2379,HOST:2379/NAME; a password goes into --etcd-password-file",
            )
        return cls(members, f"/dlrover-hooks/{name.strip('/') or 'default'}/", scheme == "etcds", user)


def _number(seq: int) -> bytes:
    return b"%016d" % seq


def _part(part: int) -> bytes:
    return b"/%05d" % part


def _place(key: bytes) -> tuple[int, int]:
    """Number and part of a key."""
    number, part = key.rsplit(b"/", 2)[-2:]
    return int(number), int(part)


def _end(prefix: bytes) -> bytes:
    """The first key that does not begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
