"""The lock and the epoch of a SQLite journal: one leader at a time, and no write of a former one."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import JournalFailed, MasterAway, UsageError
from dlrover_hooks.master.core import events
from dlrover_hooks.master.core.events import Envelope
from dlrover_hooks.master.journal.file_leadership import FileLeadership
from dlrover_hooks.master.journal.journal_protocol import LeadershipLost
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal, lock_path
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import StorageFake
from tests.e2e.job_script import join


def record(job: str) -> bytes:
    return events.encode(Envelope(now=1.0, event=join(job=job)))


def candidate(path: Path, address: str) -> FileLeadership:
    return FileLeadership(str(path), address)


def lead(one: FileLeadership) -> SqliteJournal:
    assert one.campaign(threading.Event(), lambda: None)
    assert one.journal is not None
    return one.journal


def look(one: FileLeadership) -> None:
    """A single look of a standby."""
    stop = threading.Event()
    assert not one.campaign(stop, stop.set)


def test_one_leads_and_the_next_one_takes_over(tmp_path: Path) -> None:
    """The standby knows the leader; each leader has a higher epoch, also one that has written nothing."""
    first, second = candidate(tmp_path / "m.db", "http://a:1"), candidate(tmp_path / "m.db", "http://b:2")
    for epoch in (1, 2, 3):
        lead(first).load()
        assert (first.epoch, first.holds()) == (epoch, True)
        look(second)
        assert (second.leader, second.epoch, second.holds()) == (first.leader, 0, False)
        first.resign()
        first, second = second, candidate(tmp_path / "m.db", first.leader)


def test_masters_of_one_journal_are_one_owner_of_claims(tmp_path: Path) -> None:
    """On whatever host; a master alone is another one on each host."""
    claims = set[str]()
    for address in ("http://a:1", "http://b:2"):
        one = candidate(tmp_path / "m.db", address)
        claims.add(lead(one).claims_as)
        one.resign()
    alone = SqliteJournal(tmp_path / "m.db")
    assert len(claims | {alone.claims_as}) == 2
    alone.close()


def test_a_leader_whose_lock_was_broken_writes_nothing(tmp_path: Path) -> None:
    """Somebody deleted the lock file, so another process leads, too: the epoch in the journal decides."""
    former, leader = candidate(tmp_path / "m.db", "http://a:1"), candidate(tmp_path / "m.db", "http://b:2")
    before = lead(former)
    before.load()
    before.append([record("first")])
    Path(lock_path(before.path)).unlink()
    after = lead(leader)
    after.load()
    for write in (before.probe, lambda: before.append([record("lost")])):
        with pytest.raises(LeadershipLost, match="is at epoch 2, this one at 1"):
            write()
    assert (former.holds(), leader.holds()) == (False, True)
    after.append([record("second")])
    assert set(after.load().jobs) == {"first", "second"}
    former.resign()
    leader.resign()


def test_a_question_for_readiness_finds_the_broken_lock(tmp_path: Path) -> None:
    """Without a write of its own: the master ends."""

    async def scenario() -> None:
        runtime, ended = Runtime(SqliteJournal(tmp_path / "m.db"), storage=StorageFake()), asyncio.Event()
        runtime.on_failure = ended.set
        runtime.start()
        Path(lock_path(str(tmp_path / "m.db"))).unlink()
        other = SqliteJournal(tmp_path / "m.db")
        other.load()
        assert await runtime.ready()
        await asyncio.wait_for(ended.wait(), 60)
        with pytest.raises(MasterAway):
            await runtime.query(p.ListJobs())
        await runtime.close()
        other.close()

    asyncio.run(scenario())


def test_of_two_that_have_written_nothing_the_first_writer_leads(tmp_path: Path) -> None:
    """A full disk, for example: the epoch begins with the first event."""
    one = SqliteJournal(tmp_path / "m.db")
    Path(lock_path(one.path)).unlink()
    other = SqliteJournal(tmp_path / "m.db")
    other.append([record("other")])
    with pytest.raises(LeadershipLost):
        one.append([record("one")])
    assert set(other.load().jobs) == {"other"}
    one.close()
    other.close()


def test_a_damaged_epoch_is_named(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "m.db")
    journal.load()
    journal.close()
    with sqlite3.connect(tmp_path / "m.db") as database:
        database.execute("UPDATE meta SET value = replace(value, '1 ', '2 ') WHERE name = 'epoch'")
    database.close()
    with pytest.raises(UsageError, match="its epoch does not match its checksum"):
        SqliteJournal(tmp_path / "m.db")


def test_a_standby_whose_journal_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At its start that is an error. Later it goes on trying, with one message."""
    with pytest.raises(JournalFailed, match="cannot be opened"):
        look(candidate(tmp_path / "none" / "m.db", "http://a:1"))
    leader, standby = candidate(tmp_path / "m.db", "http://a:1"), candidate(tmp_path / "m.db", "http://b:2")
    lead(leader)
    looks, stop = 0, threading.Event()

    def between() -> None:
        """After the first look the file cannot be opened; after the third one it can."""
        nonlocal looks
        looks += 1
        if looks == 1:
            leader.resign()
            (tmp_path / "m.db").rename(tmp_path / "away")
            (tmp_path / "m.db").mkdir()
        elif looks == 3:
            (tmp_path / "m.db").rmdir()
            (tmp_path / "away").rename(tmp_path / "m.db")

    assert standby.campaign(stop, between)
    assert caplog.text.count("this standby cannot lead") == 1
    standby.resign()
