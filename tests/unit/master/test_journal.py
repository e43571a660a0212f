"""A journal that cannot be read says what is damaged, and is left as it is."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, UsageError
from dlrover_hooks.master.core import events, jobs
from dlrover_hooks.master.core.events import Envelope
from dlrover_hooks.master.core.jobs import Master
from dlrover_hooks.master.journal import Journal
from tests.e2e.job_script import attach, join


def record(event: object, now: float = 1.0) -> bytes:
    return events.encode(Envelope(now=now, event=event))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with a join and two attaches."""
    journal = Journal(tmp_path / "master.db")
    journal.append([record(event) for event in (join(), attach("w0"), attach("w1"))])
    journal.close()
    return tmp_path / "master.db"


def change(path: Path, statement: str, *values: object) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute(statement, values)
    database.close()


@pytest.mark.parametrize(
    ("statement", "value", "words"),
    [
        ("UPDATE events SET record = ? WHERE seq = 2", b"\xc1\xff", "event 2: DecodeError"),
        ("UPDATE events SET record = ? WHERE seq = 2", b"\xc0", "event 2: ValidationError"),
        ("UPDATE events SET record = ? WHERE seq = 3", msgspec.msgpack.encode(["New", 1.0, None, {}]), "event 3.*New"),
        ("DELETE FROM events WHERE seq = ?", 2, "event 2.*missing, the next one is 3"),
        ("DELETE FROM events WHERE seq = ?", 1, "event 1.*missing, the next one is 2"),
        ("INSERT INTO snapshot VALUES (1, 2, ?)", b"\xc1", "its snapshot: DecodeError"),
        ("UPDATE meta SET value = ? WHERE name = 'format'", "2", "format 2"),
    ],
)
def test_damage_is_named_and_left(path: Path, statement: str, value: object, words: str) -> None:
    """Row 10: exit code 78 is that of a UsageError; the hint offers a copy or another journal."""
    change(path, statement, value)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"(?s){words}.*HINT.*another --journal"):
        load(path)
    assert path.read_bytes() == before


def load(path: Path) -> Master:
    journal = Journal(path)
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


def test_what_a_newer_release_refuses_is_passed_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Row 10: an event that was accepted once ends no later start; it changes nothing."""
    whole = jobs.encode(load(path))
    journal = Journal(path)
    journal.append([record(join(job="a\nb")), msgspec.msgpack.encode(["Lost", 1.0, None, {"job": 3}])])
    journal.close()
    assert jobs.encode(load(path)) == whole
    assert re.search("event 4 is passed over.*\n?.*control character", caplog.text)
    assert "event 5 is passed over" in caplog.text


@pytest.mark.parametrize("name", ["a\nb", "x/ledgers/y", "a\x7f"])
def test_names_that_no_address_can_show(name: str) -> None:
    """Row 12."""
    with pytest.raises(BadRequest, match="--job"):
        jobs.apply(Master(), join(job=name), 1.0)
    ledger = p.OpenLedger("job", "holder", name, "f", (p.Partition(end=9),), free=True)
    with pytest.raises(BadRequest, match="printable"):
        jobs.apply(Master(), ledger, 1.0)
