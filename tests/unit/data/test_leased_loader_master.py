"""LeasedLoader and its master: streams, silence, leases that ran out, a worker by itself."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from torch.utils.data import DataLoader

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased import loader_feed
from dlrover_hooks.data.leased.applied_ranges import LeasePart
from dlrover_hooks.data.leased.lease_client import HeldLease
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.leased.shard_dataset import Read, ShardDataset
from dlrover_hooks.data.leased.sources import Stream
from dlrover_hooks.errors import (
    HooksError,
    MasterAway,
    Stale,
    UnknownDataset,
    UsageError,
)
from tests.unit.data.lent import Ids, Log, Master, gather, marked, once, train


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_until_its_end(make: Callable[..., LeasedLoader], master: Master, workers: int) -> None:
    """Partitions and offsets, an end that is known and one that is found out."""
    stream = Stream(Log(), [p.Partition(name="a", begin=10, end=30), "b"])
    loader = make(stream, loader={"collate_fn": list, "num_workers": workers})
    seen: list[tuple[str, int]] = []
    for batch in loader:
        seen += batch
        loader.mark()
    assert Counter(seen) == Counter([("a", q) for q in range(10, 30)] + [("b", q) for q in range(21)])
    assert (master.view().done, master.view().todo) == (41, 0)


def test_without_a_master_the_leases_at_hand_are_trained_on(make: Callable[..., LeasedLoader], master: Master) -> None:
    """The master away: what is held is worked off, then a clear error."""
    loader = make(Ids(64), patience_s=0.2)
    rows = iter(loader)

    def away(request: p.Message) -> None:
        raise MasterAway(f"no answer to {type(request).__name__}")

    master.spoil = away
    seen: list[Any] = []
    with pytest.raises(MasterAway, match="no lease to train on"):
        gather(rows, loader, seen)
    assert len(seen) == 16


@pytest.mark.parametrize("error", [Stale("fence 1 is over"), UnknownDataset("it was not opened")])
def test_a_stale_fence_is_an_error_and_not_the_end(
    make: Callable[..., LeasedLoader], master: Master, error: HooksError
) -> None:
    """Bad input: never read as "finished"."""
    loader = make(Ids(64))
    rows = iter(loader)

    def refuse(request: p.Message) -> None:
        if isinstance(request, p.TakeLeases):
            raise error

    master.spoil = refuse
    with pytest.raises(type(error), match="dataset 'train'"):
        gather(rows, loader, [])


def test_a_lease_that_ran_out_is_not_trained_on(
    make: Callable[..., LeasedLoader], master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    """The master may have lent it to another worker already: what is left of it is dropped here, and done there."""

    def brief(reply: Any) -> Any:
        if isinstance(reply, p.Leases) and reply.leases:
            master.change = lambda reply: reply
            lent = (msgspec.structs.replace(reply.leases[0], within_s=0.0), *reply.leases[1:])
            return msgspec.structs.replace(reply, leases=lent)
        return reply

    master.change = brief
    seen = [sample for _, sample in train(make(Ids(40)))]
    assert Counter(seen) == Counter(range(40))
    assert "was not finished in time" in caplog.text


class Lender:
    """One lease, and what was said about it."""

    def __init__(self) -> None:
        self.held = HeldLease(p.Lease(1, "", 0, 16, 600.0), time.monotonic() + 600.0)
        self.state, self.dry, self.ready, self.claim = p.LedgerState.OPEN, True, True, "dataset"
        self.stops: list[int] = []

    def take(self) -> HeldLease:
        self.ready = False
        return self.held

    def stop(self, held: HeldLease, at: int) -> None:
        held.end = at
        self.stops.append(at)


def test_a_batch_whose_lease_ran_out_on_its_way_is_dropped() -> None:
    """It was prefetched in time, but the master may have lent it to another worker since."""
    lender: Any = Lender()
    one = loader_feed.LoaderFeed(lender, None, 4)
    picks = one.picks()
    assert [next(picks).lo for _ in range(4)] == [0, 4, 8, 12]
    one.rows = iter([Read(number, 4) for number in range(4)])
    assert one.pull(lambda: True) == loader_feed.Delivery(LeasePart(lender.held, 0, 4), 0)
    lender.held.until = 0.0
    assert one.pull(lambda: True) is None
    assert lender.stops == [4]


def test_the_loop_does_not_wait_for_the_master(make: Callable[..., LeasedLoader], master: Master) -> None:
    """While the master thinks about the next lease the one ahead is trained on."""
    loader = make(Ids(64), lookahead=1)
    rows = iter(loader)
    thinking, think = threading.Event(), threading.Event()

    def slow(request: p.Message) -> None:
        if isinstance(request, p.TakeLeases):
            thinking.set()
            assert think.wait(60)

    master.spoil = slow
    for number in range(4):  # two leases of two batches
        next(rows)
        loader.mark()
        if number >= 2:
            assert thinking.wait(60)
    # a loop that waits for the master never comes here
    threading.Timer(0.05, think.set).start()
    assert len(list(marked(rows, loader))) == 12


def test_a_worker_by_itself_keeps_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without master and session one process works alone; several are told what to do."""
    for name in ("DLROVER_HOOKS_MASTER", "DLROVER_HOOKS_JOB", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loader = LeasedLoader(DataLoader(ShardDataset(Ids(20)), 4))
    assert Counter(train(loader)) == once(20)
    loader.close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 workers need a master"):
        iter(LeasedLoader(DataLoader(ShardDataset(Ids(20)), 4)))


def test_a_master_without_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each worker would make a job of its own and train on everything."""
    for name in ("DLROVER_HOOKS_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLROVER_HOOKS_MASTER", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match="the master is known but not the job"):
        iter(LeasedLoader(DataLoader(ShardDataset(Ids(20)), 4)))
