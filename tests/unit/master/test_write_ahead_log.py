"""Damage to SQLite's log never drops an answered event without a message; a torn last write is no damage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.core import events, job_registry
from dlrover_hooks.master.core.events import Envelope
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal import write_ahead_log
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from tests.e2e.job_script import join

FRAME = 24 + 4096


class Killed:
    """The files of a journal whose master was killed, and what its state was before and after its last event."""

    def __init__(self, folder: Path, events_before: int = 30) -> None:
        live, self.path = folder / "live.db", folder / "killed.db"
        journal, state = SqliteJournal(live), Master()
        for number in range(events_before + 1):
            event = join(f"a{number}", 1, lives=f"{number}-", low=2, high=2)
            self.before = job_registry.encode(state)
            self.acknowledged = Path(f"{live}-wal").stat().st_size
            job_registry.apply(state, event, float(number))
            journal.append([events.encode(Envelope(now=float(number), event=event))])
        self.state = job_registry.encode(state)
        shutil.copy(live, self.path)
        self.log = Path(f"{live}-wal").read_bytes()
        self.base = self.path.read_bytes()
        journal.close()

    def start(self, log: bytes) -> bytes:
        """The state that the next master reads with this log. Raises UsageError."""
        self.path.write_bytes(self.base)
        Path(f"{self.path}-wal").write_bytes(log)
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        journal = SqliteJournal(self.path)
        try:
            return job_registry.encode(journal.load())
        finally:
            journal.close()

    def outcome(self, log: bytes) -> tuple[bytes | None, str]:
        """The state, or what the refusal says."""
        try:
            return self.start(log), ""
        except UsageError as error:
            return None, error.message


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path)


def test_a_flipped_byte_is_named_or_in_the_last_transaction(killed: Killed) -> None:
    """Row 10: an event that others followed is never dropped in silence."""
    chance = random.Random(1)
    refusals = 0
    for at in [*range(32), *(chance.randrange(len(killed.log)) for _ in range(150))]:
        log = bytearray(killed.log)
        log[at] ^= chance.randrange(1, 256)
        got, said = killed.outcome(bytes(log))
        dropped = at >= killed.acknowledged and got == killed.before
        assert got == killed.state or dropped or "killed.db-wal: " in said, f"byte {at} of {len(log)}: {said}"
        refusals += got is None
    assert refusals > 100


def test_a_torn_last_write_is_no_damage(killed: Killed) -> None:
    """Cut anywhere in its last transaction, which was not answered: the state before it."""
    for size in [killed.acknowledged, killed.acknowledged + 1, len(killed.log) - FRAME, len(killed.log) - 1]:
        assert killed.start(killed.log[:size]) == killed.before
    assert killed.start(killed.log) == killed.state


def test_frames_of_the_logs_previous_use_are_no_damage(tmp_path: Path) -> None:
    """After a checkpoint SQLite writes the log from its start again, and leaves the rest of it."""
    journal = SqliteJournal(tmp_path / "master.db")
    for number in range(40):
        journal.append([events.encode(Envelope(now=1.0, event=join(f"a{number}", 1)))])
    journal._db.execute("PRAGMA wal_checkpoint(RESTART)")
    journal.append([events.encode(Envelope(now=1.0, event=p.DeleteJob("job", force=True)))])
    log = Path(f"{journal.path}-wal")
    assert log.stat().st_size > 40 * FRAME
    assert write_ahead_log.damage(log) == ""
    journal.close()


def test_no_log(tmp_path: Path) -> None:
    assert write_ahead_log.damage(tmp_path / "none-wal") == ""
    (tmp_path / "empty-wal").touch()
    assert write_ahead_log.damage(tmp_path / "empty-wal") == ""
