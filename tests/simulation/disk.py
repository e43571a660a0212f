"""The master's disk: the real journal on real SQLite, which a crash may catch in the middle of a write.

The contract that SQLite keeps with `synchronous=FULL`: what `append` returned for stays; of an append that a crash
interrupts either everything or nothing is found again, however much of it reached the file. The file is torn for real:
the write-ahead log is cut somewhere in its last transaction, and sometimes the cut-off part is noise.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlrover_hooks.master.core import events, job_registry
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal

_RAM = Path("/dev/shm")


class Disk:
    """What outlives the master's processes. `torn`: the journal is a file, and a kill may tear its last write."""

    def __init__(self, dice: random.Random, *, torn: bool, slow: float) -> None:
        self.dice, self.torn, self.slow = dice, torn, slow
        self.full = False
        self.stall_s = 0.0
        """How much longer the next append takes."""
        self.durable: list[bytes] = []
        """Every record that an `append` has returned for, or that was found again."""
        self.memory: sqlite3.Connection | None = None
        self._shadow, self._replayed = job_registry.Master(), 0
        self._folder = tempfile.TemporaryDirectory(dir=_RAM if _RAM.is_dir() else None) if torn else None
        self._copies = 0
        self._journals: list[FakeJournal] = []

    def open(self) -> FakeJournal:
        """The journal of the master's next life."""
        path = Path(self._folder.name) / f"{self._copies}.db" if self._folder else None
        journal = FakeJournal(self, path)
        self._journals.append(journal)
        return journal

    def crash(self, journal: FakeJournal) -> str:
        """The master was killed: what becomes of the append that was under way, if one was."""
        if journal.pending is None or self.full:
            if self._folder:
                self._copy()
            return "between two writes"
        records, snapshot = journal.pending
        before = self._log_size() if self._folder else 0
        if not self._folder and self.dice.random() < 0.5:
            return "before a write"
        journal.write(records, snapshot)
        if not self._folder:
            self.durable += records
            return "after a write, before its answer"
        self._copy()
        return self._tear(before, records, snapshotted=snapshot is not None)

    def _log_size(self) -> int:
        log = self._path("-wal")
        return log.stat().st_size if log.exists() else 0

    def _path(self, suffix: str = "") -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{self._copies}.db{suffix}"

    def _copy(self) -> None:
        """The next life finds the files as they lie there now; closing them would put them in order."""
        old = self._path(), self._path("-wal")
        self._copies += 1
        for source, target in zip(old, (self._path(), self._path("-wal")), strict=True):
            if source.exists():
                shutil.copyfile(source, target)

    def _tear(self, before: int, records: list[bytes], *, snapshotted: bool) -> str:
        size = self._log_size()
        if size <= before or self.dice.random() < 0.2:
            self.durable += records
            return "after a write, before its answer"
        keep = self.dice.randrange(before, size)
        with open(self._path("-wal"), "r+b") as file:
            file.truncate(keep)
            if self.dice.random() < 0.5:
                file.seek(0, 2)
                file.write(self.dice.randbytes(size - keep))
        del snapshotted
        return f"in a write, {keep - before} of {size - before} bytes of it on disk"

    def replayed(self) -> bytes:
        """The state that all durable records give, by applying them here, one by one."""
        for record in self.durable[self._replayed :]:
            envelope = events.decode(record)
            job_registry.apply(self._shadow, envelope.event, envelope.now, envelope.key)
        self._replayed = len(self.durable)
        return job_registry.encode(self._shadow)

    def end(self) -> None:
        for journal in self._journals:
            journal.really_close()
        if self._folder:
            self._folder.cleanup()


class FakeJournal(SqliteJournal):
    """The journal of one life. In memory its connection goes on to the next life."""

    def __init__(self, disk: Disk, path: Path | None) -> None:
        self._disk = disk
        self.pending: tuple[list[bytes], bytes | None] | None = None
        super().__init__(path)
        self.path = "of the master"

    def _open(self, synchronous: str) -> None:
        if self.path != ":memory:":
            return super()._open("normal")  # in the simulation a crash is the master's, and slow is what we say it is
        if self._disk.memory is None:
            super()._open(synchronous)
            self._disk.memory = self._db
        self._db = self._disk.memory
        self.owner = str(self._db.execute("SELECT value FROM meta WHERE name = 'owner'").fetchone()[0])
        self._next_epoch()

    def pace(self, args: tuple[Any, ...]) -> tuple[float, float]:
        dice, slow, stall_s = self._disk.dice, self._disk.slow, 0.0
        if args:  # an append, not a load
            self.pending = args[0], args[1]
            stall_s, self._disk.stall_s = self._disk.stall_s, 0.0
        return slow * dice.random() + stall_s, slow * dice.random()

    def append(self, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        records = list(records)
        self.pending = None
        self.write(records, snapshot)
        self._disk.durable += records

    def write(self, records: list[bytes], snapshot: bytes | None) -> None:
        if self._disk.full:  # SQLite itself is to refuse, in the middle of the transaction
            pages, free = (
                self._db.execute(f"PRAGMA {kind}").fetchone()[0] for kind in ("page_count", "freelist_count")
            )
            self._db.execute(f"PRAGMA max_page_count = {pages}")
            records = [*records, bytes((free + 16) << 12)]
        try:
            super().append(records, snapshot)
        finally:
            if self._disk.full:
                self._db.execute(f"PRAGMA max_page_count = {1 << 30}")

    @property
    def kept(self) -> int:
        """How many events are durable."""
        return len(self._disk.durable)

    def close(self) -> None:
        """Only at the end of the simulation."""

    def really_close(self) -> None:
        self._db.close()
