"""What the runtime needs of a journal, and the application of a stored record to a state."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from typing import Protocol

from dlrover_hooks.errors import HooksError
from dlrover_hooks.master.core import events, job_registry
from dlrover_hooks.master.core.job_registry import Master

log = logging.getLogger("dlrover_hooks.master")
SNAPSHOT_EVERY = 10_000
"""Events between two snapshots of the state."""


class LeadershipLost(HooksError):
    """Another master may lead by now. What was being written may or may not be stored; the next leader knows."""

    status = 503


class Journal(Protocol):
    """Events in the order in which they were applied. Calls must not overlap, but may come from any thread.

    A write has one of three outcomes: it is stored (`append` returns), it is not (JournalFailed), or this process must
    not know any more (LeadershipLost): it then ends without an answer, and the clients ask the next leader.
    """

    since_snapshot: int
    """Events since the newest snapshot."""

    @property
    def claims_as(self) -> str:
        """The owner of claims on checkpoint URLs: the same for each process that may write this journal."""
        ...

    def load(self) -> Master:
        """The state after all stored events. Raises UsageError (damage), JournalFailed, LeadershipLost."""
        ...

    def append(self, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        """Store encoded envelopes, all or none; `snapshot` is the encoded state right after them.

        Raises:
            JournalFailed: nothing was written.
            LeadershipLost: unknown.
        """
        ...

    def probe(self) -> None:
        """Write a small value as durably as events. Raises JournalFailed, LeadershipLost."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


def checksum(seq: int, data: bytes) -> int:
    """Of a record and its number."""
    return zlib.crc32(data, zlib.crc32(b"%d" % seq))


def replay(journal: str, state: Master, number: int, record: bytes) -> None:
    """Apply event `number` to `state`. An event that this release refuses but an older one accepted is passed over."""
    try:
        envelope = events.decode(record)
        job_registry.apply(state, envelope.event, envelope.now, envelope.key)
    except HooksError as error:
        log.warning("journal %s: event %d is passed over, this release refuses it: %s", journal, number, error)
