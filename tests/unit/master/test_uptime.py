"""A master that was stopped, or waited for its journal, or whose wall clock is set: nobody is lost because of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, MasterError
from dlrover_hooks.master.clock import Clock, Uptime
from dlrover_hooks.master.core import dispatch, job_registry
from dlrover_hooks.master.core.events import Tick
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import StorageFake
from tests.e2e.job_script import attach, join, vote


class Hands:
    """Clocks that a test sets."""

    def __init__(self) -> None:
        self.monotonic_s, self.wall_s = 100.0, 1e9

    @property
    def clock(self) -> Clock:
        return Clock(wall=lambda: self.wall_s, monotonic=lambda: self.monotonic_s)

    def pass_by(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds


class SlowJournal(SqliteJournal):
    """While `gate` is cleared an `append` does not end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate, self.writes = threading.Event(), threading.Event()
        self.gate.set()

    def append(self, records: object, snapshot: bytes | None = None) -> None:
        self.writes.set()
        assert self.gate.wait(30)
        super().append(records, snapshot)  # type: ignore[arg-type]


@asynccontextmanager
async def training(journal: SqliteJournal, hands: Hands, **more: Any) -> AsyncIterator[Runtime]:
    """Two workers train and send heartbeats."""
    runtime = Runtime(journal, storage=StorageFake(), clock=hands.clock, **more)
    runtime.start()
    await runtime.event(join())
    for worker in ("w0", "w1"):
        await runtime.event(attach(worker))
        await runtime.query(p.Heartbeat("job", worker))
    try:
        yield runtime
    finally:
        await runtime.close()


def judge(runtime: Runtime) -> None:
    runtime._liveness._judge()


async def alive(runtime: Runtime) -> list[bool]:
    view = await runtime.query(p.ShowJob("job"))
    assert isinstance(view, p.JobView)
    return [member.alive for member in view.members]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_stopped_master_loses_nobody(tmp_path: Path) -> None:
    """Master row 3: after SIGSTOP for minutes it first hears what has come in. Silence counts from there."""

    async def scenario() -> None:
        hands = Hands()
        async with training(SqliteJournal(tmp_path / "m.db"), hands) as runtime:
            hands.pass_by(300.0)
            judge(runtime)
            assert await alive(runtime) == [True, True]
            for _ in range(30):
                hands.pass_by(0.4)
                await runtime.query(p.Heartbeat("job", "w0"))
                judge(runtime)
            assert await alive(runtime) == [True, False]

    run(scenario)


def test_a_slow_commit_loses_nobody(tmp_path: Path) -> None:
    """Master row 3: heartbeats count when they are received, and nobody sends the next one before the answer."""

    async def scenario() -> None:
        hands, journal = Hands(), SlowJournal(tmp_path / "m.db")
        async with training(journal, hands) as runtime:
            journal.gate.clear()
            journal.writes.clear()
            slow = asyncio.ensure_future(runtime.event(vote(0, 1)))
            await asyncio.to_thread(journal.writes.wait, 30)
            hands.pass_by(0.4)
            beats = [asyncio.ensure_future(runtime.query(p.Heartbeat("job", worker))) for worker in ("w0", "w1")]
            await asyncio.wait(beats, timeout=0.0)
            for _ in range(60):
                hands.pass_by(0.4)
                judge(runtime)
            journal.gate.set()
            await asyncio.wait_for(asyncio.gather(slow, *beats), 30)
            judge(runtime)
            assert await alive(runtime) == [True, True]

    run(scenario)


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_the_wall_clock_is_set(tmp_path: Path, step_s: float) -> None:
    """Master row 8: a round that forms waits for its last call and not for an hour, and no lease runs out."""

    async def scenario() -> None:
        hands = Hands()
        async with training(SqliteJournal(tmp_path / "m.db"), hands) as runtime:
            await runtime.event(p.OpenLedger("job", "w0", "d", "f", (p.Partition(end=8),)))
            lent = await runtime.event(p.TakeLeases("job", "w0", "d", 1))
            assert isinstance(lent, p.Leases)
            hands.wall_s += step_s
            await runtime.event(join("other", job="job2", low=1, high=4, lives="x", last_call_s=0.3))
            hands.pass_by(0.4)
            seated = await asyncio.wait_for(runtime.wait(p.AwaitRound("job2", "other")), 30)
            assert isinstance(seated, p.Seated)
            assert seated.world_size == 2
            await runtime.event(Tick(job="job"))
            ack = p.Ack(lent.leases[0].id, lent.leases[0].hi)
            acked = await runtime.event(p.TakeLeases("job", "w0", "d", 1, 0, acks=(ack,)))
            assert isinstance(acked, p.Leases)

    run(scenario)


def test_a_new_life_goes_on_from_the_journal(tmp_path: Path) -> None:
    """Master row 8: whatever the wall clock says by then, and however long nobody served."""
    hands = Hands()

    async def scenario(expected: float) -> None:
        async with training(SqliteJournal(tmp_path / "m.db"), hands) as runtime:
            assert runtime.state.now == pytest.approx(expected)

    run(lambda: scenario(1e9))
    hands.wall_s = 5e8
    run(lambda: scenario(1e9))
    hands.wall_s = 5e9
    run(lambda: scenario(1e9))


def test_uptime() -> None:
    hands = Hands()
    uptime = Uptime(hands.clock.monotonic, 1.0)
    hands.pass_by(0.5)
    assert uptime.seconds() == pytest.approx(0.5)
    hands.pass_by(50.0)
    assert uptime.seconds() == pytest.approx(1.5)
    assert uptime.missed_s() == pytest.approx(49.0)
    assert uptime.missed_s() == 0.0
    uptime.commit_begins()
    for _ in range(10):
        hands.pass_by(0.4)
        uptime.seconds()
    uptime.commit_ended()
    assert uptime.seconds() == pytest.approx(2.5)
    assert uptime.missed_s() == pytest.approx(3.0)


def test_a_bug_in_the_core_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Master row 6: an event that fails half way is refused, what came before it stays, and the master goes on."""

    async def scenario() -> None:
        hands, journal = Hands(), SlowJournal(tmp_path / "m.db")
        async with training(journal, hands) as runtime:
            honest = dispatch._TABLE[p.Vote]

            def broken(job: Any, event: p.Vote, now: float, effects: Any) -> p.Message:
                reply = honest(job, event, now, effects)
                if event.generation.step == 13:
                    raise OverflowError("int too big to convert")
                return reply

            monkeypatch.setitem(dispatch._TABLE, p.Vote, broken)
            journal.gate.clear()
            journal.writes.clear()
            under_way = asyncio.ensure_future(runtime.event(vote(0, 11)))
            await asyncio.to_thread(journal.writes.wait, 30)
            queued = asyncio.ensure_future(runtime.event(vote(1, 11)))
            await asyncio.wait([queued], timeout=0.0)
            with pytest.raises(MasterError, match="OverflowError"):
                await runtime.event(vote(0, 13))
            later = asyncio.ensure_future(runtime.event(vote(0, 12)))
            journal.gate.set()
            answered = await asyncio.wait_for(asyncio.gather(under_way, queued, later), 30)
            assert [type(answer) for answer in answered] == [p.Voted] * 3
            saves = runtime.state.jobs["job"].saves
            assert [entry.generation.step for entry in saves.open] == [11, 12]
            assert saves.newest_complete == p.Generation(1, 11, "run0")
            assert not runtime.failed
        assert job_registry.encode(SqliteJournal(tmp_path / "m.db").load()) == job_registry.encode(runtime.state)

    run(scenario)


def test_what_cannot_be_journaled_is_not_applied(tmp_path: Path) -> None:
    """Master row 6: storage options may hold any JSON, and so an integer that MessagePack does not know."""

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "m.db"), storage=StorageFake())
        runtime.start()
        await runtime.event(join())
        before = job_registry.encode(runtime.state)
        with pytest.raises(BadRequest, match="Attach cannot be journaled"):
            await runtime.event(attach("w0", storage_options={"size": 1 << 70}))
        assert job_registry.encode(runtime.state) == before
        await runtime.close()

    run(scenario)
