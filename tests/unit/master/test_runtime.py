"""The runtime around the core: group commit, snapshots, a journal that fails."""

from __future__ import annotations

import asyncio
import fcntl
import math
import threading
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.storage.master_storage import CommittedStorage
from dlrover_hooks.checkpoint.storage.url_claim import LOCK
from dlrover_hooks.errors import JournalFailed, MasterAway, SaveToBusy, Stale
from dlrover_hooks.master.core import effects, job_registry
from dlrover_hooks.master.core.events import Key, Lost
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.manifest_storage import HeldUrl
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import StorageFake
from tests.e2e.job_script import attach, join, vote


class FailingJournal(SqliteJournal):
    """Fails on demand, as a full disk would."""

    full = False
    loads = probes = 0

    def append(self, records: object, snapshot: bytes | None = None) -> None:
        if self.full:
            raise JournalFailed("full")
        super().append(records, snapshot)  # type: ignore[arg-type]

    def probe(self) -> None:
        self.probes += 1
        if self.full:
            raise JournalFailed("full")
        super().probe()

    def load(self) -> Master:
        self.loads += 1
        return super().load()


def test_snapshots_and_a_full_disk(tmp_path: Path) -> None:
    """Many queued votes are a few commits; snapshots replay to the live state; a failed batch never happened."""

    async def scenario() -> None:
        batches: list[int] = []
        journal = FailingJournal(tmp_path / "master.db", synchronous="normal")
        runtime = Runtime(
            journal,
            storage=StorageFake(),
            snapshot_every=20,
            observe_commit=lambda seconds, count: batches.append(count),
        )
        runtime.start()
        await runtime.event(join())
        for worker in ("w0", "w1"):
            await runtime.event(attach(worker))
        await asyncio.gather(*(runtime.event(vote(0, step)) for step in range(50)))
        assert sum(batches) == 53
        assert len(batches) < 12
        assert journal.since_snapshot < 20
        assert job_registry.encode(journal.load()) == job_registry.encode(runtime.state)
        before = job_registry.encode(runtime.state)
        journal.full = True
        answers = await asyncio.gather(*(runtime.event(vote(1, step)) for step in range(5)), return_exceptions=True)
        assert all(isinstance(answer, JournalFailed) for answer in answers)
        await runtime.query(p.ListJobs())  # waits until the state is read again
        assert job_registry.encode(runtime.state) == before
        journal.full = False
        assert isinstance(await runtime.event(vote(1, 49)), p.Voted)
        await runtime.close()

    asyncio.run(scenario())


def test_a_full_disk_costs_one_reload(tmp_path: Path) -> None:
    """Master row 13: until a probe can be written events are refused, and the state is not read again. The master's
    own events wait.
    """

    async def scenario() -> None:
        journal = FailingJournal(tmp_path / "master.db", synchronous="normal")
        runtime = Runtime(journal, storage=StorageFake())
        runtime.start()
        await runtime.event(join())
        before, loads = job_registry.encode(runtime.state), journal.loads
        journal.full = True
        for worker in ("w0", "w1") * 3:
            with pytest.raises(JournalFailed):
                await runtime.event(attach(worker, save_to="/tree"))
        assert (journal.loads, job_registry.encode(runtime.state)) == (loads + 1, before)
        runtime._inform(Lost(job="job", incarnation="w0"))
        assert (await runtime.ready()) != ""
        journal.full = False
        await runtime.event(msgspec.structs.replace(join(), job="other"))
        assert journal.loads == loads + 1

        async def told() -> None:
            while runtime.state.jobs["job"].rounds.round is not None and any(
                member.live and member.incarnation == "w0"
                for member in runtime.state.jobs["job"].rounds.round.members.values()
            ):
                await asyncio.sleep(0)

        await asyncio.wait_for(told(), 60)
        assert (await runtime.ready()) == ""
        await runtime.close()

    asyncio.run(scenario())


def test_ready_finds_a_full_disk_without_traffic(tmp_path: Path) -> None:
    """Master row 12: and finds it empty again; asked often, it does not write each time."""

    async def scenario() -> None:
        journal = FailingJournal(tmp_path / "master.db", synchronous="normal")
        runtime = Runtime(journal, storage=StorageFake())
        runtime.start()
        assert [await runtime.ready() for _ in range(9)] == [""] * 9
        assert journal.probes == 1
        journal.full = True
        assert await long_after(runtime) == "the journal cannot be written"
        journal.full = False
        assert await long_after(runtime) == ""
        await runtime.close()

    async def long_after(runtime: Runtime) -> str:
        runtime._written_at = -math.inf  # long ago
        return await runtime.ready()

    asyncio.run(scenario())


def test_a_new_life_takes_up_a_commit(tmp_path: Path) -> None:
    """A MANIFEST that was asked for and not confirmed is written by the next life."""

    async def first() -> None:
        storage = StorageFake()
        journal = SqliteJournal(tmp_path / "master.db")
        runtime = Runtime(journal, storage=storage)
        runtime.start()
        await runtime.event(join())
        for worker in ("w0", "w1"):
            await runtime.event(attach(worker, save_to="/tree"))
        runtime._do = lambda effect: None  # this life dies before any effect
        for rank in range(2):
            await runtime.event(vote(rank, 4, p.VoteKind.STORED))
        await runtime.close()
        assert not storage.manifests

    async def second() -> None:
        storage = StorageFake()
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=storage)
        runtime.start()
        await runtime.close()
        assert [manifest.generation.step for manifest in storage.manifests] == [4]

    asyncio.run(first())
    asyncio.run(second())
    journal = SqliteJournal(tmp_path / "master.db")
    committed = journal.load().jobs["job"].saves.newest_committed
    journal.close()
    assert committed == p.Generation(1, 4, "run0")


def test_the_end_waits_for_what_the_last_event_begins(tmp_path: Path) -> None:
    """The vote that completes a generation is still being journaled when the master is told to end."""

    class SlowJournal(SqliteJournal):
        writes, written = threading.Event(), threading.Event()

        def append(self, records: object, snapshot: bytes | None = None) -> None:
            self.writes.set()
            assert self.written.wait(60)
            super().append(records, snapshot)  # type: ignore[arg-type]

    async def scenario() -> None:
        storage, journal = StorageFake(), SlowJournal(tmp_path / "master.db")
        runtime = Runtime(journal, storage=storage)
        journal.written.set()
        runtime.start()
        await runtime.event(join())
        for worker in ("w0", "w1"):
            await runtime.event(attach(worker, save_to="/tree"))
        await runtime.event(vote(0, 4, p.VoteKind.STORED))
        journal.writes.clear()
        journal.written.clear()
        last = asyncio.ensure_future(runtime.event(vote(1, 4, p.VoteKind.STORED)))
        await asyncio.to_thread(journal.writes.wait, 60)
        end = asyncio.ensure_future(runtime.close())
        await asyncio.sleep(0)
        journal.written.set()
        await asyncio.gather(last, end)
        assert [manifest.generation.step for manifest in storage.manifests] == [4]

    asyncio.run(scenario())
    journal = SqliteJournal(tmp_path / "master.db")
    saves = journal.load().jobs["job"].saves
    journal.close()
    assert (saves.newest_committed, saves.committing) == (p.Generation(1, 4, "run0"), [])


@pytest.mark.parametrize("lends", [False, True])
def test_a_new_life_arms_the_leases(tmp_path: Path, lends: bool) -> None:
    """Members the journal seats must speak to the new life, or they are lost. One that trains has sent
    heartbeats to the life before, so a word about its shards promises no longer silence.
    """

    async def first() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake())
        runtime.start()
        await runtime.event(join())
        for worker in ("w0", "w1"):
            await runtime.event(attach(worker))
        await runtime.close()

    async def second() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake(), lease_s=2.0)
        runtime.start()
        if lends:
            await runtime.event(p.OpenLedger("job", "w1", "train", "f", (p.Partition(end=9),)))
        notice = await asyncio.wait_for(runtime.wait(p.Watch("job", "w0")), 10)
        assert isinstance(notice, p.Notice)
        assert notice.broken
        view = await runtime.query(p.ShowJob("job"))
        assert isinstance(view, p.JobView)
        assert [member.alive for member in view.members] == [True, False]
        await runtime.close()

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.parametrize("speaks", [False, True])
def test_a_new_life_misses_holders_without_a_seat(tmp_path: Path, speaks: bool) -> None:
    """They send no heartbeats, but keep a connection open; one that died with the master has none, and
    what it held is handed out again soon, though it may have spoken to the new life.
    """
    opening = p.OpenLedger("job", "w1", "train", "f", (p.Partition(end=1),), free=True)

    async def first() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake())
        runtime.start()
        await runtime.event(opening)
        lent = await runtime.event(p.TakeLeases("job", "w1", "train", 1, 1))
        assert isinstance(lent, p.Leases)
        assert lent.leases
        await runtime.close()

    async def second() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake(), lease_s=2.0)
        runtime.start()
        if speaks:
            await runtime.event(p.TakeLeases("job", "w1", "train", 1, 0))
        await runtime.event(msgspec.structs.replace(opening, incarnation="w2"))
        found = await asyncio.wait_for(runtime.wait(p.AwaitShards("job", "w2", "train", 1)), 10)
        assert isinstance(found, p.Leases)
        assert found.state is p.LedgerState.OPEN
        await runtime.close()

    asyncio.run(first())
    asyncio.run(second())


def test_a_job_claims_where_it_saves(tmp_path: Path) -> None:
    """An attach takes the claim on `save_to` first; a URL that another master's job holds is refused."""

    async def scenario() -> None:
        storage = StorageFake()
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=storage)
        runtime.start()
        await runtime.event(join())
        await runtime.event(attach("w0", save_to="/tree/"))
        assert storage.claims == {"/tree": "job"}
        storage.claims["/other"] = "a job of another master"
        with pytest.raises(SaveToBusy, match="/other"):
            await runtime.event(attach("w1", save_to="/other"))
        view = await runtime.query(p.ShowJob("job"))
        assert isinstance(view, p.JobView)
        assert [member.attached for member in view.members] == [True, False]
        await runtime.close()
        assert storage.claims == {"/other": "a job of another master"}

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["stopped", "reaped", "finished"])
def test_an_ended_job_gives_its_save_to_up(tmp_path: Path, end: str) -> None:
    """Row 4: another job, of this master or of another one, may save there, however the first one ended.

    The lock on the folder is real, so another process is refused as long as the claim is held.
    """
    url = str(tmp_path / "tree")

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=CommittedStorage())
        runtime.start()
        await runtime.event(join())
        for worker in ("w0", "w1"):
            await runtime.event(attach(worker, save_to=url))
        assert _locked(url)
        for worker in ("w0", "w1"):
            if end == "reaped":
                await runtime.event(p.Exited("job", "agent", worker, -9))
            else:
                how = p.Departure.DONE if end == "finished" else p.Departure.STOPPED
                await runtime.event(p.Leave("job", worker, how, 5))
        await runtime._deposits.drain(60)
        assert not _locked(url)
        await runtime.event(join("other", job="next", lives="x"))
        for worker in ("x0", "x1"):
            await runtime.event(attach(worker, job="next", save_to=url))
        assert _locked(url)
        await runtime.close()

    asyncio.run(scenario())


def _locked(url: str) -> bool:
    with open(Path(url) / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_job_that_goes_on_keeps_its_save_to(tmp_path: Path) -> None:
    """Its workers were all lost and their agent joined at once: the claim is not given up in between."""

    async def scenario() -> None:
        storage = StorageFake()
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=storage)
        runtime.start()
        await runtime.event(join(count=1, low=1, high=1))
        await runtime.event(attach("w0", save_to="/tree"))
        await asyncio.gather(
            runtime.event(p.Exited("job", "agent", "w0", -9)),
            runtime.event(join(count=1, low=1, high=1, lives="v")),
        )
        await runtime._deposits.drain(60)
        assert storage.claims == {"/tree": "job"}
        await runtime.close()

    asyncio.run(scenario())


def test_each_effect_has_an_executor(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake())
        assert set(runtime.executors) == set(typing.get_args(effects.Effect))
        runtime.start()
        await runtime.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("worker", ["w0", "stranger"])
def test_a_refused_attach_claims_nothing(tmp_path: Path, worker: str) -> None:
    """Neither one that is stale from the start nor one whose round ends while storage is asked."""

    class Slow(CommittedStorage):
        def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> HeldUrl:
            held = super().claim(url, options, job, owner)
            asked.set()
            assert ended.wait(60)
            return held

    asked, ended = threading.Event(), threading.Event()

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=Slow())
        runtime.start()
        await runtime.event(join())
        attaching = asyncio.ensure_future(runtime.event(attach(worker, save_to=str(tmp_path / "tree"))))
        if worker == "w0":
            await asyncio.get_running_loop().run_in_executor(None, asked.wait, 60)
            for name in ("w0", "w1"):
                await runtime.event(p.Leave("job", name, p.Departure.STOPPED))
        ended.set()
        with pytest.raises(Stale):
            await attaching
        await runtime._deposits.drain(60)
        if worker == "w0":
            assert not _locked(str(tmp_path / "tree"))
        else:
            assert not (tmp_path / "tree").exists()
        await runtime.close()

    asyncio.run(scenario())


def test_a_repeated_request_is_answered_by_a_journal_that_is_full(tmp_path: Path) -> None:
    """Its answer was lost. "Nothing was changed" would be false: the first attempt is in the journal."""

    async def scenario() -> None:
        journal = FailingJournal(tmp_path / "master.db")
        runtime = Runtime(journal, storage=StorageFake())
        runtime.start()
        await runtime.event(join())
        key = Key(incarnation="w0", channel="main", seq=1)
        first = await runtime.event(attach("w0"), key)
        journal.full = True
        with pytest.raises(JournalFailed):
            await runtime.event(attach("w1"))
        assert await runtime.event(attach("w0"), key) == first
        await runtime.close()

    asyncio.run(scenario())


class _HeldJournal(SqliteJournal):
    """The next write begins, and goes on or fails when the test says so."""

    def __init__(self, path: Path, *, fails: bool) -> None:
        super().__init__(path)
        self.begun, self.go_on, self._fails = threading.Event(), threading.Event(), fails

    def append(self, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        if self._fails:
            self._fails = False
            raise JournalFailed("The disk is full.")
        super().append(records, snapshot)


@pytest.mark.parametrize("fails", [False, True])
def test_a_query_shows_only_what_is_durable(tmp_path: Path, fails: bool) -> None:
    """It is answered after the commit of the events that it has seen, or without them."""

    async def scenario() -> None:
        journal = _HeldJournal(tmp_path / "m.db", fails=fails)
        runtime = Runtime(journal, storage=StorageFake())
        runtime.start()
        event = asyncio.create_task(runtime.event(join(), Key("agent", "main", 1)))
        await asyncio.to_thread(journal.begun.wait, 60)
        query = asyncio.create_task(runtime.query(p.ListJobs()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not query.done()
        journal.go_on.set()
        reply = await query
        assert isinstance(reply, p.Jobs)
        assert reply.jobs == (() if fails else ("job",))
        (found,) = await asyncio.gather(event, return_exceptions=True)
        assert isinstance(found, JournalFailed) == fails
        await runtime.close()

    asyncio.run(scenario())


def test_a_late_copy_of_a_request_deletes_no_job(tmp_path: Path) -> None:
    """The job was deleted by the first copy, and made again by the same client."""

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "m.db"), storage=StorageFake())
        runtime.start()
        event = join()
        await runtime.event(event, Key(event.incarnation, "main", 5))
        with pytest.raises(Stale):
            await runtime.event(p.DeleteJob("job", force=True), Key(event.incarnation, "main", 4))
        assert "job" in runtime.state.jobs
        await runtime.close()

    asyncio.run(scenario())


def test_whoever_left_in_vain_is_missed(tmp_path: Path) -> None:
    """The journal refused its leave, so it is still a member; its process is gone all the same."""

    async def scenario() -> None:
        journal = FailingJournal(tmp_path / "master.db")
        runtime = Runtime(journal, storage=StorageFake(), lease_s=0.2, suspicion_s=0.05)
        runtime.start()
        await runtime.event(join())
        for name in ("w0", "w1"):
            await runtime.event(attach(name))
            await runtime.query(p.Heartbeat("job", name))
        journal.full = True
        with pytest.raises(JournalFailed):
            await runtime.event(p.Leave("job", "w1", p.Departure.DONE, 5))
        journal.full = False
        told = asyncio.ensure_future(runtime.wait(p.Watch("job", "w0")))
        assert await asyncio.wait_for(told, 10) == p.Notice(round=1, broken=True)
        view = await runtime.query(p.ShowJob("job"))
        assert isinstance(view, p.JobView)
        assert [member.alive for member in view.members] == [True, False]
        await runtime.close()

    asyncio.run(scenario())


class BrokenJournal(SqliteJournal):
    """Fails as only a bug does."""

    broken = False

    def append(self, records: object, snapshot: bytes | None = None) -> None:
        if self.broken:
            raise MemoryError("no snapshot")
        super().append(records, snapshot)  # type: ignore[arg-type]


def test_a_bug_in_a_commit_ends_the_life(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is not journaled is not answered; the owner hears of it, and nobody waits for a deaf master."""

    async def scenario() -> None:
        ended = asyncio.Event()
        journal = BrokenJournal(tmp_path / "master.db")
        runtime = Runtime(journal, storage=StorageFake())
        runtime.on_failure = ended.set
        runtime.start()
        await runtime.event(join())
        poll = asyncio.ensure_future(runtime.wait(p.AwaitRound("job", "agent", after=1, timeout_s=50.0)))
        await asyncio.wait([poll], timeout=0.0)
        journal.broken = True
        lost = asyncio.gather(*(runtime.event(attach(name)) for name in ("w0", "w1")), return_exceptions=True)
        assert [type(answer) for answer in await asyncio.wait_for(lost, 10)] == [MasterAway, MasterAway]
        await asyncio.wait_for(ended.wait(), 10)
        for question in (poll, runtime.query(p.ShowJob("job")), runtime.event(attach("w0"))):
            with pytest.raises(MasterAway):
                await asyncio.wait_for(question, 10)
        assert runtime.failed
        await runtime.close()

    asyncio.run(scenario())
    assert "commit failed" in caplog.text


@pytest.mark.parametrize("synchronous", ["full", "normal"])
def test_journal_mode(tmp_path: Path, synchronous: str) -> None:
    journal = SqliteJournal(tmp_path / "master.db", synchronous=synchronous)
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == {"full": 2, "normal": 1}[synchronous]
    journal.close()
