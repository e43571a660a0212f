"""The journal: every event in SQLite before it is answered, and now and then a snapshot in place of the old ones.

Write-ahead logging with `synchronous=FULL`: what was answered survives a power cut. A batch is one transaction. One
process at a time has it open, by a lock that ends with that process. Not thread-safe: calls must not overlap, but may
come from any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlrover_hooks.errors import HooksError, JournalFailed, UsageError
from dlrover_hooks.master.core import events, jobs
from dlrover_hooks.master.core.jobs import Master

log = logging.getLogger("dlrover_hooks.master")
SNAPSHOT_EVERY = 10_000
FORMAT = 1
"""Of the tables and records. A release reads its own and older ones."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Journal:
    """Events on disk at `path` (mode 0600), or in memory if it is None. `owner` is made once and outlives restarts.

    Raises:
        UsageError: another live process has it open.
        JournalFailed: it cannot be opened.
    """

    def __init__(self, path: str | Path | None = None, *, synchronous: str = "full") -> None:
        self.path = str(path) if path is not None else ":memory:"
        self.since_snapshot = 0
        self._lock: int | None = None
        try:
            if path is not None:
                self._lock = _locked(self.path)
            self._open(synchronous)
        except UsageError:
            self._unlock()
            raise
        except (sqlite3.Error, OSError) as error:
            self._unlock()
            if type(error) is sqlite3.DatabaseError:  # of those below it each has another reason
                raise self._damaged(f"its database: {error}") from error
            raise JournalFailed(
                f"The journal {self.path} cannot be opened: {error}.",
                hint="Give --journal a writable file that belongs to this master alone.",
            ) from error

    def _open(self, synchronous: str) -> None:
        if self.path != ":memory:":
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5.0)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'NORMAL' if synchronous == 'normal' else 'FULL'}")
        self._db.executescript(_SCHEMA)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (uuid.uuid4().hex,))
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (str(FORMAT),))
        found = int(self._db.execute("SELECT value FROM meta WHERE name = 'format'").fetchone()[0])
        if found > FORMAT:
            self._db.close()
            raise UsageError(
                f"The journal {self.path} has format {found}, this release reads formats up to {FORMAT}.",
                hint="Serve it with the release that wrote it, or give another --journal.",
            )
        self.owner = str(self._db.execute("SELECT value FROM meta WHERE name = 'owner'").fetchone()[0])

    def load(self) -> Master:
        """The state: the snapshot and what happened since.

        An event that this release refuses, and an older one did not, is passed over: it changes nothing.

        Raises:
            UsageError: a part is damaged or missing. The file stays as it is.
        """
        part, count = "its snapshot", 0
        try:
            row = self._db.execute("SELECT seq, state FROM snapshot").fetchone()
            seq, state = (int(row[0]), jobs.decode(row[1])) if row else (0, Master())
            for number, record in self._db.execute("SELECT seq, record FROM events WHERE seq > ? ORDER BY seq", (seq,)):
                seq, part, count = seq + 1, f"event {seq + 1}", count + 1
                if number != seq:
                    raise LookupError(f"it is missing, the next one is {number}")
                self._replay(state, number, record)
        except Exception as error:  # whatever a damaged part leads to
            raise self._damaged(f"{part}: {type(error).__name__}: {error}") from error
        self.since_snapshot = count
        return state

    def _replay(self, state: Master, number: int, record: bytes) -> None:
        try:
            envelope = events.decode(record)
            jobs.apply(state, envelope.event, envelope.now, envelope.key)
        except HooksError as error:
            log.warning("journal %s: event %d is passed over, this release refuses it: %s", self.path, number, error)

    def _damaged(self, what: str) -> UsageError:
        return UsageError(
            f"The journal {self.path} cannot be read: {what}.",
            hint="The file is left as it is. Put a copy of it back, or give another --journal: jobs that are launched "
            "again resume from their checkpoints.",
        )

    def append(self, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        """Make encoded envelopes durable, all or none.

        `snapshot` is the encoded state right after them: it replaces them and everything before.

        Raises:
            JournalFailed: nothing was written.
        """
        rows = [(record,) for record in records]
        with self._transaction():
            self._db.executemany("INSERT INTO events (record) VALUES (?)", rows)
            if snapshot is not None:
                self._replace(snapshot)
        self.since_snapshot = 0 if snapshot is not None else self.since_snapshot + len(rows)

    def probe(self) -> None:
        """Write a little, as durably as events. Raises JournalFailed."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('probe', ?)", (uuid.uuid4().hex,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or none. Raises JournalFailed."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo()
            raise JournalFailed(
                f"The journal {self.path} cannot be written: {error}. Nothing was changed.",
                hint="Make room on its disk and send the request again.",
            ) from error

    def _replace(self, snapshot: bytes) -> None:
        """The last event stays, so that sequence numbers go on counting."""
        seq = self._db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]
        self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (seq, snapshot))
        self._db.execute("DELETE FROM events WHERE seq < ?", (seq,))

    def _undo(self) -> None:
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # on a full disk SQLite has rolled back by itself
                self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Let another process open it. Idempotent."""
        self._db.close()
        self._unlock()

    def remove(self) -> None:
        """Close it, and forget what it holds: nobody will ever ask again."""
        self._db.close()
        if self.path != ":memory:":
            Path(self.path).unlink(missing_ok=True)
            Path(lock_path(self.path)).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def lock_path(journal: str) -> str:
    """The file whose lock says that a process has `journal` open; it names that process. It stays when that ends."""
    return os.path.realpath(journal) + ".lock"


def _locked(journal: str) -> int:
    """A descriptor that holds the lock until it is closed or the process ends, however it ends.

    Not a lock of the journal itself: on NFS it would collide with SQLite's own.
    """
    path = lock_path(journal)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())
    except BlockingIOError:
        holder = os.read(lock, 1000).decode(errors="replace").strip()
        os.close(lock)
        raise UsageError(
            f"The journal {journal} is open in another master: {holder or 'its process has just started'}.",
            hint="Two masters on one journal would destroy it: end that process, or give this one another --journal.",
        ) from None
    except OSError:
        os.close(lock)
        raise
    return lock
