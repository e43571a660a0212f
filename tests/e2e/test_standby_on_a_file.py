"""Masters that wait for one SQLite journal: its lock elects the leader."""

from __future__ import annotations

import fcntl
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover_hooks.master.journal.sqlite_journal import lock_path
from tests.e2e.job_script import join
from tests.e2e.master_process import LiveMaster
from tests.e2e.several_masters import Masters, client_of, names, takeovers_under_load
from tests.waiting import until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Masters]]:
    """Starts so many masters with `master.db`."""
    started: list[Masters] = []

    def several(count: int) -> Masters:
        started.append(Masters(tmp_path, str(tmp_path / "master.db"), count, "--standby"))
        return started[-1]

    yield several
    for one in started:
        one.close()


@pytest.mark.deep
@pytest.mark.parametrize("turns", [3, 10])
def test_takeovers_under_load_lose_nothing(start: Callable[[int], Masters], turns: int) -> None:
    """Two masters; the leader is killed while clients write. Each takeover has an epoch of its own."""
    masters = start(2)
    found = takeovers_under_load(masters, turns, stop_each_second=False)
    assert found.errors == []
    assert found.jobs == dict.fromkeys(found.acknowledged, 1)
    for epoch in range(1, turns + 2):
        assert masters.told().count(f"this master leads (epoch {epoch})") == 1, masters.told()


def test_a_stopped_leader_keeps_the_lock(start: Callable[[int], Masters]) -> None:
    """There is no takeover; once it goes on it answers as before."""
    masters = start(2)
    first = masters.leader()
    masters.stop(first)
    with Path(lock_path(masters.journal)).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    masters.signal(first, signal.SIGCONT)
    client = client_of(masters)
    client.call(join())
    client.close()
    assert masters.told().count("this master leads") == 1


def test_a_leader_whose_lock_file_was_deleted_ends(start: Callable[[int], Masters]) -> None:
    """Another one leads then, too. The next write of the former leader is refused: exit code 70; nothing is lost."""
    masters = start(2)
    first = masters.leader()
    client = client_of(masters, masters.urls[first], masters.urls[1 - first])
    client.call(join())
    Path(lock_path(masters.journal)).unlink()
    masters.leader(first)
    client.call(join(job="second"))
    assert masters.processes[first].wait(60) == 70
    assert names(client) == {"job", "second"}
    client.close()


def test_a_standby_waits_for_a_master_that_is_none(start: Callable[[int], Masters], live_master: LiveMaster) -> None:
    """One that was started without --standby is not disturbed, and is replaced when it has ended."""
    live_master.client("agent").call(join())
    masters = start(1)
    until(lambda: masters.readiness(0) is not None, "the standby", diagnostic=masters.told)
    live_master.client("agent").call(join(job="second"))
    live_master.kill()
    masters.leader()
    client = client_of(masters)
    assert names(client) == {"job", "second"}
    client.close()


def test_a_damaged_journal_is_named_at_the_takeover(start: Callable[[int], Masters]) -> None:
    """As at the start of a single master: exit code 78, no traceback, and the file is left as it is."""
    masters = start(2)
    first = masters.leader()
    client = client_of(masters)
    client.call(join())
    client.close()
    masters.stop(first)
    with sqlite3.connect(masters.journal) as database:
        database.execute("UPDATE events SET crc = crc + 1")
    database.close()
    masters.kill(first)
    assert masters.processes[1 - first].wait(60) == 78
    assert "event 1: ValueError: it does not match its checksum" in masters.told()
    assert "Traceback" not in masters.told()
