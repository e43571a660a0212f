"""The ledgers, one suite for every master: see `test_master_contract`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Stale, UnknownDataset, UnknownJob
from dlrover_hooks.protocol.ranges import Ranges
from tests.contracts.masters import CallerOf, started
from tests.e2e.job_script import attach, join, stored


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return f"job/{request.node.name}"


def opening(job: str, worker: str, **more: Any) -> p.OpenLedger:
    """40 samples in leases of 10."""
    fields: dict[str, Any] = {
        "job": job, "incarnation": worker, "name": "train/a", "fingerprint": "f40",
        "partitions": (p.Partition(end=40),), "epoch_length": 40, "batch_size": 2, "shard_size": 10,
    }  # fmt: skip
    return p.OpenLedger(**(fields | more))


def taking(job: str, worker: str, *acks: p.Ack, fence: int = 1, count: int = 1, **more: Any) -> p.TakeLeases:
    return p.TakeLeases(job, worker, "train/a", fence, count, acks=acks, **more)


@pytest.mark.requirement("DL-65", "DL-67", "DL-69")
def test_a_dataset_is_lent_out_and_ends(caller_of: CallerOf, job: str) -> None:
    """TODO, DOING, done; partial acknowledgements, said again too; the end is told at once."""
    started(caller_of, job)
    for worker in ("w0", "w1"):
        assert caller_of(worker).call(opening(job, worker)) == p.Ledger(fence=1)
    mine = caller_of("w0").call(taking(job, "w0", count=3))
    assert [(lease.lo, lease.hi, lease.within_s) for lease in mine.leases] == [
        (0, 10, 600),
        (10, 20, 600),
        (20, 30, 600),
    ]
    assert mine.state is p.LedgerState.OPEN
    theirs = caller_of("w1").call(taking(job, "w1", count=3))
    assert ([(lease.lo, lease.hi) for lease in theirs.leases], theirs.state) == ([(30, 40)], p.LedgerState.WAITING)
    first, second, third = mine.leases
    for _ in range(2):
        caller_of("w0").call(taking(job, "w0", p.Ack(first.id, 6), count=0))
        caller_of("w0").call(taking(job, "w0", p.Ack(second.id, 20), count=0))
    view = caller_of("any").call(p.ShowLedger(job, "train/a"))
    assert view == p.LedgerView(fence=1, done=16, doing={"w0": 14, "w1": 10}, todo=0, leases=3)
    caller_of("w1").call(taking(job, "w1", p.Ack(theirs.leases[0].id, 40), count=0))
    ended = caller_of("w0").call(taking(job, "w0", p.Ack(first.id, 10), p.Ack(third.id, 30)))
    assert (ended.state, ended.leases) == (p.LedgerState.FINISHED, ())
    assert caller_of("w1").call(p.AwaitShards(job, "w1", "train/a", 1)).state is p.LedgerState.FINISHED


@pytest.mark.requirement("DL-73")
def test_what_a_dead_worker_held_comes_back_first(caller_of: CallerOf, job: str) -> None:
    """The rest of its leases goes to the front of TODO, and a worker that waits for it hears of it."""
    for worker in ("w0", "w1"):
        caller_of(worker).call(opening(job, worker, free=True))
    held = caller_of("w0").call(taking(job, "w0", count=2)).leases
    caller_of("w0").call(taking(job, "w0", p.Ack(held[0].id, 4), count=0))
    rest = caller_of("w1").call(taking(job, "w1", count=2))
    assert rest.state is p.LedgerState.WAITING
    found: list[p.Leases] = []
    poll = p.AwaitShards(job, "w1", "train/a", 1, timeout_s=60.0)

    def wait() -> None:
        while not found or found[-1].state is None:
            found.append(caller_of("w1").call(poll))

    waiter = threading.Thread(target=wait)
    waiter.start()
    caller_of("w0").call(p.Leave(job, "w0", p.Departure.FAILED))
    waiter.join(60)
    assert found[-1].state is p.LedgerState.OPEN
    again = caller_of("w1").call(taking(job, "w1", count=3))
    assert [(lease.lo, lease.hi) for lease in again.leases] == [(4, 10), (10, 20)]
    with pytest.raises(Stale, match="'w0'"):
        caller_of("w0").call(taking(job, "w0", p.Ack(held[1].id, 20)))


@pytest.mark.requirement("DL-65", "DL-73")
def test_nothing_to_take_yet(caller_of: CallerOf, job: str) -> None:
    """A long-poll whose time passes says so; a graceful leave gives back at once."""
    for worker in ("w0", "w1"):
        caller_of(worker).call(opening(job, worker, free=True))
    caller_of("w0").call(taking(job, "w0", count=4))
    assert caller_of("w1").call(p.AwaitShards(job, "w1", "train/a", 1, timeout_s=0.02)) == p.Leases()
    caller_of("w0").call(p.Leave(job, "w0", p.Departure.STOPPED))
    assert caller_of("w1").call(p.AwaitShards(job, "w1", "train/a", 1)).state is p.LedgerState.OPEN
    assert caller_of("w1").call(p.ShowLedger(job, "train/a")).todo == 40


def test_a_holder_without_a_seat_is_a_part_of_the_job(caller_of: CallerOf, job: str) -> None:
    """The first one makes the job; it may beat and leave like a member; an unknown one is refused."""
    caller_of("w0").call(opening(job, "w0", free=True))
    assert caller_of("w0").call(p.Heartbeat(job, "w0", step=3)).round == 0
    assert caller_of("any").call(p.ShowJob(job)).round == 0
    with pytest.raises(Stale, match="stranger"):
        caller_of("stranger").call(taking(job, "stranger"))
    caller_of("agent").call(p.Exited(job, "agent", "w0", -9))
    with pytest.raises(Stale):
        caller_of("w0").call(p.Heartbeat(job, "w0"))
    joined = caller_of("agent").call(join(job=job))
    assert joined.run == "run0"


def test_every_attempt_starts_from_the_cut(caller_of: CallerOf, job: str) -> None:
    """What the loaded images hold is done, nothing else; the fence is the attempt; rank 0 hears the cut."""
    caller_of("agent").call(join(job=job))
    caller_of("w1").call(attach("w1", job=job, save_to=f"memory://{job}"))
    caller_of("w0").call(attach("w0", job=job, save_to=f"memory://{job}", stored=(stored(4),)))
    plan = caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0"))
    with pytest.raises(Stale, match="restoring"):
        caller_of("w0").call(opening(job, "w0"))
    for worker, done in (("w0", ((0, 6), (10, 12))), ("w1", ((6, 10),))):
        cuts = {"train/a": {"": Ranges.of(done).encode()}}
        caller_of(worker).call(p.Loaded(job, worker, plan.round, True, cuts=cuts))
    whole = caller_of("w0").call(opening(job, "w0"))
    assert (whole.fence, Ranges.decode(whole.done[""])) == (2, Ranges.of([(0, 12)]))
    assert caller_of("w1").call(opening(job, "w1")) == p.Ledger(fence=2)
    got = caller_of("w1").call(taking(job, "w1", fence=2))
    assert [(lease.lo, lease.hi) for lease in got.leases] == [(12, 22)]
    with pytest.raises(Stale, match="fence 1"):
        caller_of("w1").call(taking(job, "w1", p.Ack(got.leases[0].id, 22), fence=1))


def test_an_unknown_dataset_is_never_finished(caller_of: CallerOf, job: str) -> None:
    """404, whichever worker asks, and for whatever (a real peer's bug)."""
    started(caller_of, job)
    for request in (taking(job, "w0"), p.AwaitShards(job, "w0", "train/a", 1), p.ShowLedger(job, "train/a")):
        with pytest.raises(UnknownDataset, match="train/a") as unknown:
            caller_of("w0").call(request)
        assert unknown.value.status == 404
    with pytest.raises(UnknownJob):
        caller_of("w0").call(p.ShowLedger(job + "2", "train/a"))
    with pytest.raises(UnknownJob):
        caller_of("w0").call(opening(job + "2", "w0"))


def test_bad_ledgers_are_refused(caller_of: CallerOf, job: str) -> None:
    """Empty, negative, overlapping, another dataset under the same name: each says what it was."""
    started(caller_of, job)
    caller_of("w0").call(opening(job, "w0"))
    one = p.Partition
    for word, bad in {
        "empty": opening(job, "w1", name="x", epoch_length=0, partitions=(one(begin=3, end=3),)),
        "nothing to train on": opening(job, "w1", name="x", partitions=(one(end=0),)),
        "whole number": opening(job, "w1", name="x", partitions=(one(end=41),)),
        "shard_size": opening(job, "w1", name="x", shard_size=-1),
        "batch_size": opening(job, "w1", name="x", batch_size=0),
        "each once": opening(job, "w1", name="x", partitions=(one("a"), one("a")), epoch_length=0),
        r"\[5, 3\)": opening(job, "w1", name="x", partitions=(one(begin=5, end=3),), epoch_length=0),
        "name": opening(job, "w1", name=""),
        "'f41'": opening(job, "w1", fingerprint="f41"),
        "alike": opening(job, "w1", partitions=(one(end=80),)),
        "free=True": opening(job, "w1", free=True),
    }.items():
        with pytest.raises(BadRequest, match=word):
            caller_of("w1").call(bad)
    with pytest.raises(UnknownDataset):
        caller_of("w0").call(p.ShowLedger(job, "x"))


def test_bad_acknowledgements_change_nothing(caller_of: CallerOf, job: str) -> None:
    """Negative, overlapping, beyond the lease, another's: refused as a whole, the good ones beside them too."""
    started(caller_of, job)
    for worker in ("w0", "w1"):
        caller_of(worker).call(opening(job, worker))
    first, second = caller_of("w0").call(taking(job, "w0", count=2)).leases
    other = caller_of("w1").call(taking(job, "w1")).leases[0]
    good, ack = p.Ack(first.id, 4), p.Ack
    for error, bad in (
        (BadRequest, taking(job, "w0", good, ack(second.id, -1))),
        (BadRequest, taking(job, "w0", good, ack(second.id, 9))),
        (BadRequest, taking(job, "w0", good, ack(second.id, 21))),
        (BadRequest, taking(job, "w0", good, ack(first.id, 6))),
        (BadRequest, taking(job, "w0", good, ack(second.id, 12, failed="io", failed_upto=11))),
        (BadRequest, taking(job, "w0", good, ack(second.id, 20, failed="io"))),
        (Stale, taking(job, "w0", good, ack(other.id, 30))),
        (Stale, taking(job, "w0", good, ack(99, 30))),
        (Stale, taking(job, "w0", good, fence=2)),
        (BadRequest, taking(job, "w0", good, epoch=1)),
        (BadRequest, taking(job, "w0", good, epoch=-1)),
        (BadRequest, taking(job, "w0", good, count=65)),
        (BadRequest, taking(job, "w0", good, count=-1)),
        (BadRequest, taking(job, "w0", good, rate=-1.0)),
    ):
        with pytest.raises(error):
            caller_of("w0").call(bad)
    with pytest.raises(BadRequest):
        caller_of("w0").call(p.AwaitShards(job, "w0", "train/a", 1, epoch=1))
    assert caller_of("w0").call(p.ShowLedger(job, "train/a")).done == 0


def test_what_cannot_be_read_is_left_out_loudly(caller_of: CallerOf, job: str) -> None:
    """Quarantine after three reports; the list comes with the end of the epoch, the rest is trained on."""
    started(caller_of, job)
    caller_of("w0").call(opening(job, "w0", shard_size=40))
    reply = p.Leases()
    for _ in range(3):
        for lease in caller_of("w0").call(taking(job, "w0", count=4)).leases:
            bad = lease.lo <= 7 < lease.hi
            ack = p.Ack(lease.id, 7, failed="no such file") if bad else p.Ack(lease.id, lease.hi)
            reply = caller_of("w0").call(taking(job, "w0", ack, count=0))
    assert reply.state is p.LedgerState.FINISHED
    assert reply.quarantined == (p.Quarantined("", 7, 8, "no such file"),)
    view = caller_of("w0").call(p.ShowLedger(job, "train/a"))
    assert (view.done, view.todo, view.quarantined) == (39, 0, reply.quarantined)


def test_a_stream_has_no_end_until_its_source_says_so(caller_of: CallerOf, job: str) -> None:
    """Named partitions in turn, positions are offsets; told the end, the ledger finishes."""
    parts = (p.Partition("p0", begin=100), p.Partition("p1"))
    ends = (p.Partition("p0", begin=100, end=112), p.Partition("p1", end=10))
    caller_of("w0").call(opening(job, "w0", partitions=parts, epoch_length=0, free=True))
    mine = caller_of("w0").call(taking(job, "w0", count=4)).leases
    assert [(lease.partition, lease.lo) for lease in mine] == [("p0", 100), ("p1", 0), ("p0", 110), ("p1", 10)]
    assert caller_of("any").call(p.ShowLedger(job, "train/a")).todo is None
    acks = [p.Ack(lease.id, lease.hi) for lease in mine[:2]]
    assert caller_of("w0").call(taking(job, "w0", *acks, count=0)).state is p.LedgerState.OPEN
    caller_of("w1").call(opening(job, "w1", partitions=ends, epoch_length=0, free=True))
    acks = [p.Ack(mine[2].id, 112), p.Ack(mine[3].id, 10)]
    assert caller_of("w0").call(taking(job, "w0", *acks)).state is p.LedgerState.FINISHED
    assert caller_of("any").call(p.ShowLedger(job, "train/a")) == p.LedgerView(fence=1, done=22, doing={}, todo=0)
    with pytest.raises(BadRequest, match="alike"):
        caller_of("w2").call(
            opening(job, "w2", partitions=(ends[0], p.Partition("p1", end=12)), epoch_length=0, free=True)
        )
