"""A journal that cannot be read says what is damaged, and is left as it is."""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, JournalFailed, UsageError
from dlrover_hooks.master.core import events, job_registry
from dlrover_hooks.master.core.events import Envelope
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal.journal_protocol import checksum
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from tests.e2e.job_script import attach, join


def record(event: object, now: float = 1.0) -> bytes:
    return events.encode(Envelope(now=now, event=event))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with a join and two attaches."""
    journal = SqliteJournal(tmp_path / "master.db")
    journal.append([record(event) for event in (join(), attach("w0"), attach("w1"))])
    journal.close()
    return tmp_path / "master.db"


SIGNED = "UPDATE events SET record = ?1, crc = crc(2, ?1) WHERE seq = 2"
"""A record that was written so: its checksum is right."""


def change(path: Path, statement: str, *values: object) -> None:
    database = sqlite3.connect(path)
    database.create_function("crc", 2, checksum, deterministic=True)
    with database:
        database.execute(statement, values)
    database.close()


@pytest.mark.parametrize(
    ("statement", "value", "words"),
    [
        (SIGNED, b"\xc1\xff", "event 2: DecodeError"),
        (SIGNED, b"\xc0", "event 2: ValidationError"),
        (SIGNED, msgspec.msgpack.encode(["New", 1.0, None, {}]), "event 2.*New"),
        ("UPDATE events SET record = ? WHERE seq = 2", b"\xc0", "event 2: ValueError: it does not match its checksum"),
        ("DELETE FROM events WHERE seq = ?", 2, "event 2.*missing, the next one is 3"),
        ("DELETE FROM events WHERE seq = ?", 1, "event 1.*missing, the next one is 2"),
        (
            "INSERT INTO snapshots VALUES (5, ?, 0)",
            b"\xc1",
            "snapshot at event 5: .*checksum; and without it: .*event 4",
        ),
        ("UPDATE meta SET value = ? WHERE name = 'format'", "3", "format 3"),
        ("UPDATE meta SET value = ? WHERE name = 'format'", "two", "its database: .*two"),
        ("UPDATE meta SET value = ? WHERE name = 'owner'", "another", "its tables and owner do not match"),
        ("DELETE FROM meta WHERE name = ?", "format", "table 'meta' has no 'format'"),
        ("ALTER TABLE events RENAME TO evenus", None, "table 'events' is missing"),
        ("ALTER TABLE events RENAME COLUMN crc TO arc", None, "its tables and owner do not match"),
    ],
)
def test_damage_is_named_and_left(path: Path, statement: str, value: object, words: str) -> None:
    """Row 10: exit code 78 is that of a UsageError; the hint offers a copy or another journal."""
    change(path, statement, *(() if value is None else (value,)))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"(?s){words}.*HINT.*another --journal"):
        load(path)
    assert path.read_bytes() == before


def load(path: Path) -> Master:
    journal = SqliteJournal(path)
    try:
        return journal.load()
    finally:
        journal.close()


def test_a_damaged_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"(?s)malformed.*HINT.*another --journal"):
        load(path)


FORMAT_1 = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO meta VALUES ('owner', 'whose'), ('format', '1');
"""


def test_large_events_leave_memory(tmp_path: Path) -> None:
    """SQLite's statements keep the values that they had last, and each number of events may be a statement."""
    journal, large = SqliteJournal(tmp_path / "master.db"), bytes(2**19)
    journal.append([record(join())])
    process = psutil.Process()
    before = process.memory_info().rss
    for count in range(1, 17):
        journal.append([large] * count)
    assert process.memory_info().rss - before < 2**25
    journal.close()


def test_format_1_is_read_and_goes_on_as_format_2(tmp_path: Path) -> None:
    """It has a snapshot, the last event in it, and one more; from now on damage is noticed."""
    path, state = tmp_path / "master.db", Master()
    history: list[Any] = [join(), attach("w0"), attach("w1")]
    for event in history[:2]:
        job_registry.apply(state, event, 1.0)
    database = sqlite3.connect(path)
    database.executescript(FORMAT_1)
    with database:
        database.execute("INSERT INTO snapshot VALUES (1, 2, ?)", (job_registry.encode(state),))
        database.executemany("INSERT INTO events VALUES (?, ?)", [(2, record(history[1])), (3, record(history[2]))])
    database.close()
    job_registry.apply(state, history[2], 1.0)
    assert job_registry.encode(load(path)) == job_registry.encode(state)
    journal = SqliteJournal(path)
    assert journal.owner == "whose"
    journal.append([record(p.Leave("job", "w0", p.Departure.FAILED))])
    journal.close()
    job_registry.apply(state, p.Leave("job", "w0", p.Departure.FAILED), 1.0)
    assert job_registry.encode(load(path)) == job_registry.encode(state)
    change(path, "UPDATE events SET record = ? WHERE seq = 3", record(history[1]))
    with pytest.raises(UsageError, match=r"event 3: .*checksum"):
        load(path)


def long(path: Path) -> bytes:
    """A journal with two snapshots and events before, between and after them. Returns its state."""
    journal, state = SqliteJournal(path, synchronous="normal"), Master()
    for number in range(60):
        event = join(f"a{number}", 1, lives=f"{number}-", low=2, high=2)
        job_registry.apply(state, event, float(number))
        journal.append([record(event, float(number))], job_registry.encode(state) if number in (20, 40) else None)
    journal.close()
    return job_registry.encode(state)


@pytest.mark.parametrize("damage", ["state = x'c1'", "state = substr(state, 2)", "seq = 39", "crc = crc + 1"])
def test_a_damaged_snapshot_is_made_up_for_by_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """All events since that one are there. The next snapshot takes the place of the damaged one."""
    path = tmp_path / "master.db"
    state = long(path)
    change(path, f"UPDATE snapshots SET {damage} WHERE seq = (SELECT max(seq) FROM snapshots)")
    assert job_registry.encode(load(path)) == state
    assert "its snapshot at event" in caplog.text
    journal = SqliteJournal(path)
    journal.load()
    journal.append([], state)
    assert [seq for (seq,) in journal._db.execute("SELECT seq FROM snapshots")] == [21, 60]
    assert job_registry.encode(journal.load()) == state
    journal.close()
    change(path, "UPDATE snapshots SET state = x'c1'")
    with pytest.raises(UsageError, match=r"snapshot at event 60: .*; and without it: .*event 1\b.*missing"):
        load(path)


def outcome(path: Path) -> tuple[bytes | None, str]:
    """Its state; or what the refusal says."""
    try:
        return job_registry.encode(load(path)), "another state, and nothing said"
    except (UsageError, JournalFailed) as error:
        return None, error.message


@pytest.mark.parametrize("part", range(4))
def test_a_flipped_byte_is_made_up_for_or_named(tmp_path: Path, part: int) -> None:
    """Anywhere in the file, at a part of its bytes: the same state, or the refusal that names the journal."""
    path = tmp_path / "master.db"
    state, whole = long(path), path.read_bytes()
    chance = random.Random(part)
    for at in [*range(100 * (part == 0)), *(chance.randrange(len(whole)) for _ in range(len(whole) // 100))]:
        damaged = bytearray(whole)
        damaged[at] ^= chance.randrange(1, 256)
        path.write_bytes(damaged)
        got, said = outcome(path)
        assert got == state or (got is None and str(path) in said), f"byte {at} became {damaged[at]}: {said}"
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


def test_what_a_newer_release_refuses_is_passed_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Row 10: an event that was accepted once ends no later start; it changes nothing."""
    whole = job_registry.encode(load(path))
    journal = SqliteJournal(path)
    journal.append([record(join(job="a\nb")), msgspec.msgpack.encode(["Lost", 1.0, None, {"job": 3}])])
    journal.close()
    assert job_registry.encode(load(path)) == whole
    assert re.search("event 4 is passed over.*\n?.*control character", caplog.text)
    assert "event 5 is passed over" in caplog.text


@pytest.mark.parametrize("name", ["a\nb", "x/ledgers/y", "a\x7f"])
def test_names_that_no_address_can_show(name: str) -> None:
    """Row 12."""
    with pytest.raises(BadRequest, match="--job"):
        job_registry.apply(Master(), join(job=name), 1.0)
    ledger = p.OpenLedger("job", "holder", name, "f", (p.Partition(end=9),), free=True)
    with pytest.raises(BadRequest, match="printable"):
        job_registry.apply(Master(), ledger, 1.0)


KILLED = """
import os, shutil, signal, sys
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal

def killed_before(path, number):
    def count(frame, event, called):
        nonlocal number
        if event == "c_call" and called.__name__.startswith("execute"):
            number -= 1
            if number < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    SqliteJournal(path)
    os._exit(0)

ended, number = -1, 0
while ended != 0:
    path = f"{sys.argv[1]}/{number}.db"
    if sys.argv[2:]:
        shutil.copy(sys.argv[2], path)
    if (child := os.fork()) == 0:
        killed_before(path, number)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    journal = SqliteJournal(path)
    assert journal.load().jobs == {}
    journal.close()
    number += 1
print(number)
"""


@pytest.mark.parametrize("old", [False, True])
def test_a_master_that_is_killed_while_it_makes_or_converts_its_journal(tmp_path: Path, old: bool) -> None:
    """Before each of its SQL statements: the next process can use the file."""
    given = [tmp_path]
    if old:
        given.append(tmp_path / "format-1.db")
        database = sqlite3.connect(given[1])
        database.executescript(FORMAT_1)
        database.close()
    done = subprocess.run([sys.executable, "-c", KILLED, *given], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 8
