"""The runtime around the core: group commit, snapshots, a journal that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import JournalFailed
from dlrover_hooks.master.core import jobs
from dlrover_hooks.master.journal import Journal
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import StorageFake
from tests.e2e.job_script import attach, join, vote


class FailingJournal(Journal):
    """Fails on demand, as a full disk would."""

    full = False

    def append(self, records: object, snapshot: bytes | None = None) -> None:
        if self.full:
            raise JournalFailed("full")
        super().append(records, snapshot)  # type: ignore[arg-type]


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
        assert jobs.encode(journal.load()) == jobs.encode(runtime.state)
        before = jobs.encode(runtime.state)
        journal.full = True
        answers = await asyncio.gather(*(runtime.event(vote(1, step)) for step in range(5)), return_exceptions=True)
        assert all(isinstance(answer, JournalFailed) for answer in answers)
        assert jobs.encode(runtime.state) == before
        journal.full = False
        assert isinstance(await runtime.event(vote(1, 49)), p.Voted)
        await runtime.close()

    asyncio.run(scenario())


def test_a_new_life_takes_up_a_commit(tmp_path: Path) -> None:
    """A MANIFEST that was asked for and not confirmed is written by the next life."""

    async def first() -> None:
        storage = StorageFake()
        journal = Journal(tmp_path / "master.db")
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
        runtime = Runtime(Journal(tmp_path / "master.db"), storage=storage)
        runtime.start()
        await runtime.close()
        assert [manifest.generation.step for manifest in storage.manifests] == [4]

    asyncio.run(first())
    asyncio.run(second())
    journal = Journal(tmp_path / "master.db")
    committed = journal.load().jobs["job"].saves.newest_committed
    journal.close()
    assert committed == p.Generation(1, 4, "run0")


@pytest.mark.parametrize("synchronous", ["full", "normal"])
def test_journal_mode(tmp_path: Path, synchronous: str) -> None:
    journal = Journal(tmp_path / "master.db", synchronous=synchronous)
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == {"full": 2, "normal": 1}[synchronous]
    journal.close()
