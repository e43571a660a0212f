"""The journal: stores every event in SQLite before it is answered; snapshots of the state replace old events.

Write-ahead logging with `synchronous=FULL`: answered events survive a power cut. A batch is one transaction. Only one
process has the journal open, which a lock ensures that ends with the process. Should the lock fail (its file was
deleted, or a network file system lost it), the epoch detects it: the first write of a process raises the stored epoch,
and each later one is refused if another process has raised it since. Not thread-safe: calls must not overlap, but may
come from any thread.

Each record has a checksum that includes its number. The newest two snapshots are kept, with all events since the older
one: damage to the newest snapshot loses nothing. Any other damage that is found is reported, and no request is
served.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import socket
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlrover_hooks.errors import JournalFailed, UsageError
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal import write_ahead_log
from dlrover_hooks.master.journal.journal_protocol import LeadershipLost, checksum, replay

log = logging.getLogger("dlrover_hooks.master")
FORMAT = 2
"""Version of the tables and records. A release reads its own format and older ones."""
_TABLES = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, record BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL, crc INTEGER NOT NULL);
"""
_SCHEMA = f"""
BEGIN IMMEDIATE;
{_TABLES}
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_FROM_1 = f"""
BEGIN IMMEDIATE;
ALTER TABLE events RENAME TO events_1;
{_TABLES}
INSERT INTO events SELECT seq, record, crc(seq, record) FROM events_1;
INSERT INTO snapshots SELECT seq, state, crc(seq, state) FROM snapshot;
DROP TABLE events_1;
DROP TABLE snapshot;
UPDATE meta SET value = '2' WHERE name = 'format';
"""
"""Format 1 had no checksums: its records are assumed to be undamaged. Like `_SCHEMA` without an end, see `_sign`."""
_HAS = {1: {"events", "snapshot", "meta"}, 2: {"events", "snapshots", "meta"}}
"""Tables, by format."""
_EPOCH = "SELECT value FROM meta WHERE name = 'epoch'"
_ROWS_AT_ONCE = 64
"""Most events in one statement, of three values each: SQLite before 3.32 takes 999, and each length is another
statement for the cache of 128."""
_BYTES_AT_ONCE = 64 * 2**10
"""Most bytes of their records: a statement in the cache keeps copies of the values that it had last."""


class JournalInUse(UsageError):
    """Another live process has the journal open. `address`: its URL, if it is one of several masters."""

    address: str = ""


class SqliteJournal:
    """Events on disk at `path` (mode 0600), or in memory if it is None. `owner` is made once and kept.

    `address`: this master's URL, if it is one of several that wait for the journal: the others read it there.

    Raises:
        JournalInUse: another live process has it open.
        UsageError: it is damaged.
        JournalFailed: it cannot be opened.
    """

    def __init__(self, path: str | Path | None = None, *, synchronous: str = "full", address: str = "") -> None:
        self.path = str(path) if path is not None else ":memory:"
        self.since_snapshot = 0
        self.lost = False
        """Another process has raised the epoch: this one writes nothing any more."""
        self._address = address
        self._last = self._sound = 0
        """Numbers of the last event and of the newest snapshot that is known to be undamaged."""
        self._lock: int | None = None
        try:
            if path is not None:
                self._lock = _locked(self.path, address)
            self._open(synchronous)
        except UsageError:
            self._unlock()
            raise
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            self._unlock()
            # the subclasses of DatabaseError have other reasons than damage
            if type(error) is sqlite3.DatabaseError or isinstance(error, (ValueError, TypeError)):
                raise self._damaged(f"its database: {error}") from error
            raise JournalFailed(
                f"The journal {self.path} cannot be opened: {error}.",
                hint="Give --journal a writable file that belongs to this master alone.",
            ) from error

    def _open(self, synchronous: str) -> None:
        if self.path != ":memory:":
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if lost := write_ahead_log.damage(f"{self.path}-wal"):
                raise ValueError(f"{self.path}-wal: {lost}")
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5.0)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'NORMAL' if synchronous == 'normal' else 'FULL'}")
        self._db.create_function("crc", 2, checksum, deterministic=True)
        if not (tables := self._tables()):
            self._begin()
        found = int(self._value("format"))
        if found > FORMAT:
            self._db.close()
            raise UsageError(
                f"The journal {self.path} has format {found}, this release reads formats up to {FORMAT}.",
                hint="Serve it with the release that wrote it, or give another --journal.",
            )
        if tables and (lacking := _HAS[found] - tables):
            raise ValueError(f"table {min(lacking)!r} is missing")
        self.owner = self._value("owner")
        if found == 1:
            self._check_pages()
            self._db.executescript(_FROM_1)
            self._sign()
        elif self._value("crc") != self._signature():
            raise ValueError("its tables and owner do not match their checksum")
        self._next_epoch()
        last = "SELECT max(coalesce((SELECT max(seq) FROM events), 0), coalesce((SELECT max(seq) FROM snapshots), 0))"
        self._last = int(self._db.execute(last).fetchone()[0])

    def _next_epoch(self) -> None:
        self._seen_epoch = self._stored_epoch()
        self.epoch = self._seen_epoch + 1
        """How many processes have had the journal, with this one. Stored by `load`, or with the first write."""

    def _tables(self) -> set[str]:
        names = self._db.execute("SELECT CAST(name AS BLOB) FROM sqlite_master WHERE type = 'table'")
        return {name.decode(errors="replace") for (name,) in names}

    def _begin(self) -> None:
        """Create a new journal in one transaction: a process that is killed meanwhile leaves nothing of it.

        Never for an existing journal: a missing table there is damage.
        """
        self._db.executescript(_SCHEMA)
        self.owner = uuid.uuid4().hex
        for name, value in (("owner", self.owner), ("format", str(FORMAT))):
            self._db.execute("INSERT INTO meta VALUES (?, ?)", (name, value))
        self._sign()

    def _value(self, name: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise ValueError(f"table 'meta' has no {name!r}")
        return str(row[0])

    def _signature(self) -> str:
        """Checksum of the owner and of the tables' SQL: damage to that SQL changes which rows SQLite finds."""
        tables = self._db.execute("SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        return str(checksum(FORMAT, b"\0".join([self.owner.encode(), *(sql for (sql,) in tables)])))

    def _sign(self) -> None:
        """Write the signature, and end the transaction in which the tables were made."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('crc', ?)", (self._signature(),))
        self._db.execute("COMMIT")

    def _check_pages(self) -> None:
        """SQLite's own check, which finds rows whose loss nothing else would show. Raises ValueError."""
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise ValueError(str(found))

    @property
    def claims_as(self) -> str:
        """See `Journal`. With the host, unless masters of several hosts may share the file: a copy on another host is
        another journal.
        """
        if self._address:
            return f"the masters of a shared journal ({self.owner})"
        return f"master {self.owner} on {socket.gethostname()}"

    def load(self) -> Master:
        """The state: the newest undamaged snapshot and the events since.

        Skips an event that this release refuses but an older release accepted.

        Raises:
            UsageError: a part is damaged or missing and cannot be replaced by another one. The file is not changed.
            LeadershipLost: see `append`.
        """
        try:
            if self.path != ":memory:":
                self._check_pages()
            newest = int(self._db.execute("SELECT coalesce(max(seq), 0) FROM snapshots").fetchone()[0])
        except Exception as error:  # damage may raise any exception
            raise self._damaged(f"its database: {error}") from error
        seq, state, bad = self._snapshot()
        try:
            last = self._since(seq, state)
            if last < newest:
                raise self._damaged(f"event {last + 1}: it is missing")
        except UsageError as error:
            if bad:
                raise self._damaged(f"{bad}; and without it: {error.message}") from error
            raise
        if bad:
            log.warning(
                "journal %s: %s: the state is that of the snapshot before, and the events since", self.path, bad
            )
        self._last, self._sound, self.since_snapshot = last, seq, last - seq
        if self._seen_epoch != self.epoch:
            with contextlib.suppress(JournalFailed), self._transaction():  # stores the epoch
                pass  # on a full disk it begins with the first event
        return state

    def _snapshot(self) -> tuple[int, Master, str]:
        """Number and state of the newest undamaged snapshot (else 0 and an empty state); the damage of the newest."""
        bad = ""
        try:
            rows = self._db.execute("SELECT seq, state, crc FROM snapshots ORDER BY seq DESC").fetchall()
        except Exception as error:
            raise self._damaged(f"its snapshots: {type(error).__name__}: {error}") from error
        for seq, state, crc in rows:
            try:
                _check(seq, state, crc)
                return int(seq), job_registry.decode(state), bad
            except Exception as error:
                bad = bad or f"its snapshot at event {seq}: {type(error).__name__}: {error}"
        return 0, Master(), bad

    def _since(self, seq: int, state: Master) -> int:
        """Apply the events after number `seq` to `state`. Returns the number of the last one."""
        try:
            rows = self._db.execute("SELECT seq, record, crc FROM events WHERE seq > ? ORDER BY seq", (seq,))
            for number, record, crc in rows:
                seq += 1
                if number != seq:
                    raise LookupError(f"it is missing, the next one is {number}")
                _check(number, record, crc)
                replay(self.path, state, number, record)
        except Exception as error:  # a damaged part may raise any exception
            raise self._damaged(f"event {seq}: {type(error).__name__}: {error}") from error
        return seq

    def _damaged(self, what: str) -> UsageError:
        return UsageError(
            f"The journal {self.path} cannot be read: {what}.",
            hint="The file is left as it is. Put a copy of it back, or give another --journal: jobs that are launched "
            "again resume from their checkpoints.",
        )

    def append(self, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        """Make encoded envelopes durable, all or none.

        `snapshot` is the encoded state right after them; it makes old events and snapshots removable.

        Raises:
            JournalFailed: nothing was written.
            LeadershipLost: nothing was written, another process has the journal.
        """
        rows = [(seq, record, checksum(seq, record)) for seq, record in enumerate(records, self._last + 1)]
        last = self._last + len(rows)
        if snapshot is not None or not self._insert(rows):
            with self._transaction():
                self._db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
                if snapshot is not None:
                    self._replace(last, snapshot)
        self._last = last
        self.since_snapshot += len(rows)
        if snapshot is not None:
            self._sound, self.since_snapshot = last, 0

    def _insert(self, rows: list[tuple[int, bytes, int]]) -> bool:
        """Add events in one statement, which is its own transaction. False: nothing was written, because it is the
        first write of this epoch, or the stored epoch is another one, or there are no rows or too many or large ones.

        A transaction of four statements, each of which releases the GIL, takes 40 us of CPU time more.
        """
        if self._seen_epoch != self.epoch or not 0 < len(rows) <= _ROWS_AT_ONCE:
            return False
        if sum(len(record) for _, record, _ in rows) > _BYTES_AT_ONCE:
            return False
        places = ", ".join(["(?, ?, ?)"] * len(rows))
        insert = f"INSERT INTO events SELECT * FROM (VALUES {places}) WHERE ? = ({_EPOCH})"
        with self._writing():
            return self._db.execute(insert, (*itertools.chain(*rows), self._epoch_value())).rowcount == len(rows)

    def probe(self) -> None:
        """Write a small value, as durably as events. Raises JournalFailed, LeadershipLost."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('probe', ?)", (uuid.uuid4().hex,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction around the block, in this process's epoch. Raises JournalFailed, LeadershipLost."""
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            self._check_epoch()
            yield
            self._db.execute("COMMIT")
            self._seen_epoch = self.epoch

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Roll back an open transaction if the block raises. An error of SQLite is raised as JournalFailed."""
        try:
            yield
        except LeadershipLost:
            self._undo()
            raise
        except sqlite3.Error as error:
            self._undo()
            raise JournalFailed(
                f"The journal {self.path} cannot be written: {error}. Nothing was changed.",
                hint="Make room on its disk and send the request again.",
            ) from error

    def _check_epoch(self) -> None:
        """Within a transaction. Raises LeadershipLost."""
        if (found := self._stored_epoch()) != self._seen_epoch:
            self.lost = True
            raise LeadershipLost(
                f"another process has opened the journal {self.path}: it is at epoch {found}, this one at {self.epoch}"
            )
        if found != self.epoch:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (self._epoch_value(),))

    def _epoch_value(self) -> str:
        return f"{self.epoch} {checksum(self.epoch, b'')}"

    def _stored_epoch(self) -> int:
        """0 in a journal of a release without epochs. Raises ValueError: it is damaged."""
        row = self._db.execute(_EPOCH).fetchone()
        epoch, _, crc = str(row[0]).partition(" ") if row is not None else ("0", "", "")
        if row is not None and crc != str(checksum(int(epoch), b"")):
            raise ValueError("its epoch does not match its checksum")
        return int(epoch)

    def _replace(self, last: int, snapshot: bytes) -> None:
        """Add a snapshot. Keep the one before and the events since that one, in case the new one gets damaged."""
        self._db.execute(
            "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (last, snapshot, checksum(last, snapshot))
        )
        if last > self._sound:
            self._db.execute("DELETE FROM snapshots WHERE seq NOT IN (?, ?)", (last, self._sound))
            self._db.execute("DELETE FROM events WHERE seq <= ?", (self._sound,))

    def _undo(self) -> None:
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # on a full disk SQLite has rolled back by itself
                self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Close the database and release the lock, so that another process can open it. Idempotent."""
        self._db.close()
        self._unlock()

    def remove(self) -> None:
        """Close the journal and delete its files."""
        self._db.close()
        if self.path != ":memory:":
            Path(self.path).unlink(missing_ok=True)
            Path(lock_path(self.path)).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _check(seq: int, data: bytes, crc: int) -> None:
    if checksum(seq, data) != crc:
        raise ValueError("it does not match its checksum")


def lock_path(journal: str) -> str:
    """The lock file of `journal`. It names the process that has the journal open, and is not deleted when that ends."""
    return os.path.realpath(journal) + ".lock"


def _locked(journal: str, address: str) -> int:
    """A descriptor that holds the lock until it is closed or the process ends in any way.

    A separate file is locked, not the journal itself: on NFS that would collide with SQLite's own lock. Its first line
    names the process, its second one is `address`, if that is given.
    """
    path = lock_path(journal)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        lines = [f"pid {os.getpid()} on host {socket.gethostname()}", *([address] if address else [])]
        os.write(lock, "".join(f"{line}\n" for line in lines).encode())
    except BlockingIOError:
        error = _in_use(journal, os.read(lock, 1000).decode(errors="replace"))
        os.close(lock)
        raise error from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _in_use(journal: str, holder: str) -> JournalInUse:
    """`holder`: the text of the lock file, which its process may be writing."""
    process, _, rest = holder.partition("\n")
    address, complete, _ = rest.partition("\n")
    error = JournalInUse(
        f"The journal {journal} is open in another master: {process or 'its process has just started'}.",
        hint="Two masters on one journal would destroy it: end that process, start both with --standby, or give this "
        "one another --journal.",
    )
    error.address = address if complete else ""
    return error
