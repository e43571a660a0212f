"""One suite for every master: the core in process (`Alone`, `MasterFake`) and a real process over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.alone import Alone
from dlrover_hooks.errors import BadRequest, SaveToBusy, Stale, UnknownDataset, UnknownJob
from dlrover_hooks.ranges import Ranges
from dlrover_hooks.testing import MasterFake, StorageFake
from tests.e2e.job_script import attach, held, join, stored, vote
from tests.e2e.master_process import LiveMaster

CallerOf = Callable[[str], Any]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMaster]:
    master = LiveMaster(tmp_path_factory.mktemp("master"))
    yield master
    master.close()


@pytest.fixture(params=["alone", "fake", "process"])
def caller_of(request: pytest.FixtureRequest) -> Iterator[CallerOf]:
    """Gives a caller for an incarnation. Each test has jobs of its own: the process is shared."""
    if request.param == "process":
        yield request.getfixturevalue("process").client
        return
    master = Alone(storage=StorageFake()) if request.param == "alone" else MasterFake()
    yield lambda incarnation: master
    master.close()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return f"job/{request.node.name}"


def started(caller_of: CallerOf, job: str, **more: Any) -> p.Plan:
    """Two workers of one node train."""
    caller_of("agent").call(join(job=job))
    for index in range(2):
        caller_of(f"w{index}").call(attach(f"w{index}", job=job, **more))
    return caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0"))


def test_ranks_world_and_place_of_rank_zero(caller_of: CallerOf, job: str) -> None:
    """DL-78, DL-79, DL-80: the master gives ranks, and what is needed to build the world."""
    joined = caller_of("agent").call(join(job=job))
    seated = caller_of("agent").call(p.AwaitRound(job=job, incarnation="agent"))
    assert (joined.run, seated.ranks, seated.world_size, seated.node_count) == ("run0", (0, 1), 2, 1)
    assert (seated.master_addr, seated.master_port, seated.store_prefix) == ("127.0.0.1", 29500, f"{job}/run0/1")


def test_members_change_ranks_again(caller_of: CallerOf, job: str) -> None:
    """DL-81, DL-84, DL-85: a lost member breaks the round; the survivor is rank 0 of the next."""
    for agent, life in (("a", "x"), ("b", "y")):
        caller_of(agent).call(join(agent, 1, lives=life, job=job))
    assert caller_of("b").call(p.AwaitRound(job=job, incarnation="b")).ranks == (1,)
    caller_of("a").call(p.Exited(job=job, incarnation="a", worker="x0", exit_code=-9))
    assert caller_of("y0").call(p.Heartbeat(job=job, incarnation="y0")).broken
    caller_of("a").call(join("a", 1, lives="new", job=job))
    caller_of("b").call(join("b", 1, lives="y", job=job))
    again = caller_of("b").call(p.AwaitRound(job=job, incarnation="b", after=1))
    assert (again.round, again.ranks, again.world_size) == (2, (0,), 2)


def test_waiting_ends_with_the_round(caller_of: CallerOf, job: str) -> None:
    """DL-78: a long-poll of a waiting agent is answered when the last seat is taken."""
    caller_of("a").call(join("a", 1, lives="x", job=job))
    found: list[p.Seated] = []
    ask = p.AwaitRound(job=job, incarnation="a", timeout_s=5.0)

    def wait() -> None:
        while not found or found[-1].round is None:
            found.append(caller_of("a").call(ask))

    waiter = threading.Thread(target=wait)
    waiter.start()
    caller_of("b").call(join("b", 1, lives="y", job=job))
    waiter.join(10)
    assert found[-1].round == 1


def test_nothing_yet(caller_of: CallerOf, job: str) -> None:
    """A long-poll whose time passes says so."""
    caller_of("a").call(join("a", 1, lives="x", job=job))
    assert caller_of("a").call(p.AwaitRound(job=job, incarnation="a", timeout_s=0.02)).round is None


def test_a_fresh_start_trains_at_once(caller_of: CallerOf, job: str) -> None:
    plan = started(caller_of, job)
    assert (plan.phase, plan.attempt, plan.run, plan.restore) == (p.Phase.TRAINING, 1, "run0", None)


def test_memory_wins_over_older_storage_and_falls_back_to_it(caller_of: CallerOf, job: str) -> None:
    """The restore choice is part of the round; what a rank cannot load makes a new round without it."""
    slots = (held(8, 0), held(8, 1), held(9, 0))
    caller_of("agent").call(join(job=job))
    caller_of("w1").call(attach("w1", job=job, save_to=f"memory://{job}"))
    caller_of("w0").call(attach("w0", job=job, save_to=f"memory://{job}", held=slots, stored=(stored(4),)))
    plan = caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0"))
    assert (plan.phase, plan.restore.generation.step, plan.restore.source) == (p.Phase.RESTORING, 8, p.Source.MEMORY)
    assert plan.attempt == 2
    bad = p.Loaded(job=job, incarnation="w1", round=plan.round, ok=False, reason="hash")
    caller_of("w1").call(bad)
    again = caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0", after=plan.number))
    assert (again.restore.generation.step, again.restore.source, again.round) == (4, p.Source.STORAGE, 2)
    assert again.attempt == 3
    assert "rank 1" in again.fallbacks[0]
    assert "hash" in again.fallbacks[0]
    with pytest.raises(Stale, match="round 1"):
        caller_of("w0").call(p.Loaded(job=job, incarnation="w0", round=1, ok=True))
    for worker in ("w0", "w1"):
        caller_of(worker).call(p.Loaded(job=job, incarnation=worker, round=2, ok=True))
    last = caller_of("w1").call(p.AwaitPlan(job=job, incarnation="w1", after=again.number))
    assert last.phase is p.Phase.TRAINING
    assert last.restore == again.restore


def test_complete_only_when_all_voted(caller_of: CallerOf, job: str) -> None:
    started(caller_of, job)
    first = caller_of("w0").call(vote(0, 4, job=job))
    both = caller_of("w1").call(vote(1, 4, job=job))
    assert first.newest_complete is None
    assert both.newest_complete == p.Generation(attempt=1, step=4, run="run0")


def test_strangers_and_stale_attempts_are_refused(caller_of: CallerOf, job: str) -> None:
    """409 for an old incarnation or attempt, 404 for a job nobody joined."""
    with pytest.raises(UnknownJob):
        caller_of("w0").call(p.Heartbeat(job=job, incarnation="w0"))
    started(caller_of, job)
    with pytest.raises(Stale, match="zombie") as stale:
        caller_of("zombie").call(p.Heartbeat(job=job, incarnation="zombie"))
    assert stale.value.status == 409
    assert stale.value.hint
    with pytest.raises(Stale, match="attempt 1"):
        caller_of("w0").call(vote(0, 4, attempt=2, job=job))


def test_bad_joins_are_refused(caller_of: CallerOf, job: str) -> None:
    for bad in (
        join(job=job, low=3, high=2),
        join(job=job, low=0, high=0),
        join(job=job, count=3),
        join(job=""),
        join(job=job, seats=()),
        join(job=job, seats=(p.Seat("x", 0), p.Seat("x", 1))),
        join(job=job, seats=(p.Seat("x", 0, 0), p.Seat("y", 1))),
        join(job=job, seats=(p.Seat("x", 0, 0), p.Seat("y", 1, 2))),
    ):
        with pytest.raises(BadRequest):
            caller_of("agent").call(bad)
    with pytest.raises(UnknownJob):
        caller_of("agent").call(p.ShowJob(job=job))


def test_done_is_remembered(caller_of: CallerOf, job: str) -> None:
    """A newcomer after the end is told, and does not train from step 0; `fresh` starts anew. (No save_to.)"""
    started(caller_of, job)
    for worker in ("w0", "w1"):
        caller_of(worker).call(p.Leave(job=job, incarnation=worker, reason=p.Departure.DONE, step=7))
    late = caller_of("late").call(join("late", job=job, lives="l", again=True))
    assert (late.finished, late.finished_step) == (True, 7)
    anew = caller_of("anew").call(join("anew", job=job, lives="n", fresh=True, proposed_run="run1"))
    assert (anew.finished, anew.run) == (False, "run1")


def test_a_finished_job_goes_on_for_longer(caller_of: CallerOf, job: str) -> None:
    """DL-57: started again, it restores the last step from storage, in the run that it was, in a later attempt."""
    started(caller_of, job, save_to=f"memory://{job}/tree")
    run = caller_of("w0").call(p.ShowJob(job)).run
    for worker in ("w0", "w1"):
        caller_of(worker).call(p.Leave(job=job, incarnation=worker, reason=p.Departure.DONE, step=7))
    caller_of("again").call(join("again", job=job, lives="n", again=True, proposed_run="run1"))
    last = msgspec.structs.replace(stored(7), job=job, generation=p.Generation(attempt=1, step=7, run=run))
    for worker in ("n0", "n1"):
        caller_of(worker).call(attach(worker, job=job, save_to=f"memory://{job}/tree", stored=(last,)))
    plan = caller_of("n0").call(p.AwaitPlan(job, "n0"))
    assert plan.restore is not None
    assert plan.restore.generation == last.generation
    assert (plan.run, plan.attempt) == (run, 2)
    assert not caller_of("n0").call(p.ShowJob(job)).finished


def test_two_live_jobs_on_one_url(caller_of: CallerOf, job: str) -> None:
    started(caller_of, job, save_to=f"memory://{job}/tree")
    caller_of("agent").call(join(job=job + "2"))
    with pytest.raises(SaveToBusy):
        caller_of("w0").call(attach("w0", job=job + "2", save_to=f"memory://{job}/tree/"))


def test_one_job_as_it_stands(caller_of: CallerOf, job: str) -> None:
    """DL-79: all workers can be seen."""
    started(caller_of, job)
    caller_of("w1").call(p.Heartbeat(job=job, incarnation="w1", step=3, vitals=p.Vitals(cpu_percent=50.0)))
    view = caller_of("any").call(p.ShowJob(job=job))
    assert [(member.rank, member.attached, member.alive, member.step) for member in view.members] == [
        (0, True, True, 0),
        (1, True, True, 3),
    ]
    assert (view.phase, view.round, view.attempt, view.step) == (p.Phase.TRAINING, 1, 1, 3)
    assert job in caller_of("any").call(p.ListJobs()).jobs


def test_a_watch_tells_of_a_break_once(caller_of: CallerOf, job: str) -> None:
    """DL-77: survivors learn of a death without polling."""
    started(caller_of, job)
    told, heard = threading.Event(), []

    def notice(news: p.Notice) -> None:
        heard.append(news)
        told.set()

    caller = caller_of("w0")
    alone = isinstance(caller, Alone)
    watch = caller.watch(job, notice, incarnation="w0") if alone else caller.watch(job, notice)
    caller_of("agent").call(p.Exited(job=job, incarnation="agent", worker="w1", exit_code=-9))
    assert told.wait(10)
    caller_of("w0").call(p.Heartbeat(job=job, incarnation="w0"))
    watch.close()
    assert heard == [p.Notice(round=1, broken=True)]


# ---- ledgers (DL-63 to DL-69) ----------------------------------------------------------------------------------------


def opening(job: str, worker: str, **more: Any) -> p.OpenLedger:
    """40 samples in leases of 10."""
    fields: dict[str, Any] = {
        "job": job, "incarnation": worker, "name": "train/a", "fingerprint": "f40",
        "partitions": (p.Partition(end=40),), "epoch_length": 40, "batch_size": 2, "shard_size": 10,
    }  # fmt: skip
    return p.OpenLedger(**(fields | more))


def taking(job: str, worker: str, *acks: p.Ack, fence: int = 1, count: int = 1, **more: Any) -> p.TakeLeases:
    return p.TakeLeases(job, worker, "train/a", fence, count, acks=acks, **more)


def test_a_dataset_is_lent_out_and_ends(caller_of: CallerOf, job: str) -> None:
    """DL-65, DL-66, DL-67: TODO, DOING, done; partial acknowledgements, said again too; the end is told at once."""
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


def test_what_a_dead_worker_held_comes_back_first(caller_of: CallerOf, job: str) -> None:
    """DL-68, DL-69: the rest of its leases goes to the front of TODO, and whoever waits for it hears of it."""
    for worker in ("w0", "w1"):
        caller_of(worker).call(opening(job, worker, free=True))
    held = caller_of("w0").call(taking(job, "w0", count=2)).leases
    caller_of("w0").call(taking(job, "w0", p.Ack(held[0].id, 4), count=0))
    rest = caller_of("w1").call(taking(job, "w1", count=2))
    assert rest.state is p.LedgerState.WAITING
    found: list[p.Leases] = []
    poll = p.AwaitShards(job, "w1", "train/a", 1, timeout_s=5.0)

    def wait() -> None:
        while not found or found[-1].state is None:
            found.append(caller_of("w1").call(poll))

    waiter = threading.Thread(target=wait)
    waiter.start()
    caller_of("w0").call(p.Leave(job, "w0", p.Departure.FAILED))
    waiter.join(10)
    assert found[-1].state is p.LedgerState.OPEN
    again = caller_of("w1").call(taking(job, "w1", count=3))
    assert [(lease.lo, lease.hi) for lease in again.leases] == [(4, 10), (10, 20)]
    with pytest.raises(Stale, match="'w0'"):
        caller_of("w0").call(taking(job, "w0", p.Ack(held[1].id, 20)))


def test_nothing_to_take_yet(caller_of: CallerOf, job: str) -> None:
    """A long-poll whose time passes says so; a graceful leave gives back at once (DL-69)."""
    for worker in ("w0", "w1"):
        caller_of(worker).call(opening(job, worker, free=True))
    caller_of("w0").call(taking(job, "w0", count=4))
    assert caller_of("w1").call(p.AwaitShards(job, "w1", "train/a", 1, timeout_s=0.02)) == p.Leases()
    caller_of("w0").call(p.Leave(job, "w0", p.Departure.STOPPED))
    assert caller_of("w1").call(p.AwaitShards(job, "w1", "train/a", 1)).state is p.LedgerState.OPEN
    assert caller_of("w1").call(p.ShowLedger(job, "train/a")).todo == 40


def test_a_holder_without_a_seat_is_a_part_of_the_job(caller_of: CallerOf, job: str) -> None:
    """The first one makes the job; it may beat and leave like a member; whoever is unknown is refused."""
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
    """DL-87: what the loaded images hold is done, nothing else; the fence is the attempt; rank 0 hears the cut."""
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
    """404, whoever asks, and for whatever (a real peer's bug)."""
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
    """Named partitions in turn, positions are offsets; told the end, the ledger finishes (DL-64)."""
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
