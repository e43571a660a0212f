"""The ledger machine by itself: sizes, deadlines, quarantine, attempts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.effects import Deadline, Wake
from dlrover_hooks.master.core.events import Key, Lost, Tick
from dlrover_hooks.protocol.ranges import Ranges
from tests.e2e.job_script import attach, join, stored


class Core:
    """A core at a time of the test's choice; free holders unless told otherwise."""

    def __init__(self) -> None:
        self.state, self.now, self.seq = job_registry.Master(), 1000.0, 0
        self.effects: tuple[Any, ...] = ()

    def send(self, event: p.Message, key: Key | None = None) -> Any:
        outcome = job_registry.apply(self.state, event, self.now, key)
        self.effects = outcome.effects
        return outcome.reply

    def open(self, who: str = "w0", *, end: int = 10_000, epochs: int = 1, **more: Any) -> p.Ledger:
        parts = more.pop("partitions", (p.Partition(end=end * epochs),))
        fields = {"epoch_length": end, "batch_size": 10, "free": True} | more
        return self.send(p.OpenLedger("job", who, "data", fields.pop("fingerprint", "f"), parts, **fields))

    def take(self, who: str = "w0", *acks: p.Ack, count: int = 1, fence: int = 1, **more: Any) -> p.Leases:
        return self.send(p.TakeLeases("job", who, "data", fence, count, acks=acks, **more))

    @property
    def ledger(self) -> Any:
        return self.state.jobs["job"].ledgers.named["data"]

    def deadlines(self) -> list[float]:
        return [effect.at - 1000.0 for effect in self.effects if isinstance(effect, Deadline)]


def spans(reply: p.Leases) -> list[tuple[int, int]]:
    return [(lease.lo, lease.hi) for lease in reply.leases]


def test_sizes_follow_the_speed_and_the_rest() -> None:
    """A lease is 5 s of the holder's work in whole batches, 64 batches at first, and less for all near the end."""
    core = Core()
    core.open("fast")
    core.open("slow")
    assert spans(core.take("fast", count=0)) == []
    assert spans(core.take("slow")) == [(0, 640)]
    assert spans(core.take("fast", rate=200.0)) == [(640, 1640)]
    core.now += 64.0
    got = core.take("slow", p.Ack(1, 640))
    assert spans(got) == [(1640, 1690)], "10 positions a second, by its acknowledgements"
    for _ in range(20):
        got = core.take("fast", count=1, rate=200.0)
    (lo, hi), rest = spans(got)[0], 10_000 - core.ledger.books[""].next
    assert hi - lo == (rest + hi - lo) // 8 // 10 * 10


@pytest.mark.parametrize(("shard", "size"), [(25, 20), (3, 10), (7000, 5000)])
def test_a_size_of_the_users_choice(shard: int, size: int) -> None:
    """In whole batches, at least one, and never over the border of an epoch."""
    core = Core()
    core.open(end=5000, epochs=2, shard_size=shard)
    assert spans(core.take()) == [(0, size)]


def test_epochs_are_lent_one_by_one() -> None:
    """A worker that leaves an epoch early finds the rest of it later; each epoch finishes for itself."""
    core = Core()
    core.open(end=30, epochs=3, shard_size=20)
    assert spans(core.take(epoch=0, count=1)) == [(0, 20)]
    assert spans(core.take(epoch=2, count=9)) == [(60, 80), (80, 90)]
    assert spans(core.take(epoch=0, count=9)) == [(20, 30)]
    assert core.take("w0", p.Ack(1, 20), p.Ack(4, 30), epoch=0).state is p.LedgerState.FINISHED
    assert spans(core.take(epoch=1, count=9)) == [(30, 50), (50, 60)]
    with pytest.raises(BadRequest, match="3 epochs"):
        core.take(epoch=3)


def test_deadlines() -> None:
    """600 s while nothing is known, then 8 times the work that the holder has before it, 60 s at least."""
    core = Core()
    core.open(shard_size=1000)
    assert core.take(count=2).leases[1].within_s == 600.0
    assert core.deadlines() == [600.0]
    core.now += 100.0
    got = core.take("w0", p.Ack(1, 1000))
    assert got.leases[0].within_s == 8 * 2000 / 10.0
    assert core.take(rate=1e6, count=0).leases == ()
    assert core.take(count=1).leases[0].within_s == 60.0
    assert core.deadlines() == [160.0], "sooner than all before"


def test_what_runs_out_comes_back() -> None:
    """An expired lease is returned; acknowledging it is refused; the ticks are few."""
    core = Core()
    core.open("w0", shard_size=100)
    core.open("w1", shard_size=100)
    first = core.take("w0").leases[0]
    core.now += 10.0
    core.take("w1")
    core.now = 1600.5
    core.send(Tick("job"))
    assert any(isinstance(effect, Wake) for effect in core.effects)
    assert core.deadlines() == [610.0]
    assert spans(core.take("w1")) == [(0, 100)]
    with pytest.raises(Stale, match=r"Lease 1 .* is over"):
        core.take("w0", p.Ack(first.id, 50))
    core.now = 1610.0
    core.send(Tick("job"))
    assert core.deadlines() == [1200.5]


def test_headway_renews_all_that_a_holder_has() -> None:
    """A slow worker that acknowledges in parts keeps its leases."""
    core = Core()
    core.open(shard_size=1000)
    core.take(count=2)
    for step in range(1, 10):
        core.now += 500.0
        core.take("w0", p.Ack(1, 100 * step), count=0)
        core.send(Tick("job"))
    assert len(core.ledger.leases) == 2


def test_a_restart_arms_the_deadline_again() -> None:
    """A new life of the master is told when the next lease runs out."""
    core = Core()
    core.open()
    core.take()
    assert [effect.at for effect in job_registry.unfinished_effects(core.state)] == [1600.0]  # type: ignore[union-attr]


def test_what_kills_its_holders_is_found_and_left_out() -> None:
    """Lost again and again, a range comes in halves, so that at last little is given up, and loudly."""
    core = Core()
    core.open(end=6400, shard_size=6400)
    poison, reply, lives = 3333, p.Leases(), 0
    while reply.state is not p.LedgerState.FINISHED:
        lives += 1
        assert lives < 40, "it never ends"
        core.open(f"w{lives}", end=6400, shard_size=6400)
        reply = core.take(f"w{lives}")
        while reply.leases and reply.state is not p.LedgerState.FINISHED:
            lease = reply.leases[0]
            if lease.lo <= poison < lease.hi:
                core.send(Lost("job", f"w{lives}"))
                break
            reply = core.take(f"w{lives}", p.Ack(lease.id, lease.hi))
    (given_up,) = reply.quarantined
    assert given_up.lo <= poison < given_up.hi
    assert given_up.hi - given_up.lo <= 50
    assert "lost with its holder" in given_up.reason
    assert core.ledger.books[""].done.size == 6400 - (given_up.hi - given_up.lo)


def test_very_many_unreadable_ranges_are_told_in_bounds() -> None:
    """A reply is bounded, and says how much more there is."""
    core = Core()
    core.open(end=2000, shard_size=1, batch_size=1)
    books = core.ledger.books[""]
    for _ in range(3):
        while (reply := core.take(count=64)).leases:
            acks = [p.Ack(one.id, one.lo, failed=f"bad {one.lo}") for one in reply.leases if one.lo % 2]
            acks += [p.Ack(one.id, one.hi) for one in reply.leases if not one.lo % 2]
            core.take("w0", *acks, count=0)
            if not books.returned and books.next == 2000:
                break
    told = core.take().quarantined
    assert len(told) == 256
    assert "745 ranges more, 745 positions" in told[-1].reason


def test_opened_again_a_holder_holds_nothing() -> None:
    core = Core()
    core.open(shard_size=100)
    core.take(count=2)
    core.open(shard_size=100)
    assert spans(core.take()) == [(0, 100)]
    with pytest.raises(Stale):
        core.take("w0", p.Ack(1, 100))


def test_nobody_holds_more_than_it_can_use() -> None:
    """Memory of the master stays bounded whatever one worker asks for."""
    core = Core()
    core.open(shard_size=10)
    assert [len(core.take(count=64).leases) for _ in range(5)] == [64, 64, 64, 64, 0]


def test_idempotency_memory_of_holders_without_a_seat_is_bounded() -> None:
    """They come and go and no round ever forms."""
    core = Core()
    for life in range(300):
        name = f"w{life}"
        core.open(name)
        core.send(p.Leave("job", name, p.Departure.STOPPED), Key(name, "main", 1))
    assert len(core.state.jobs["job"].replies) <= 65


# ---- attempts --------------------------------------------------------------------------------------------------------


def restoring(core: Core, step: int = 4) -> None:
    """Two members that are to load `step`."""
    core.send(join())
    for worker in ("w0", "w1"):
        core.send(attach(worker, save_to="/tree", stored=(stored(step),)))


def loaded(core: Core, worker: str, *done: tuple[int, int]) -> None:
    number = core.state.jobs["job"].rounds.number
    core.send(p.Loaded("job", worker, number, True, cuts={"data": {"": Ranges.of(done).encode()}} if done else {}))


def test_nothing_is_lent_before_the_cut_is_known() -> None:
    """A member that goes on with its old incarnation and fence meets a closed ledger until all have loaded."""
    core = Core()
    core.send(join(low=2, high=2))
    for worker in ("w0", "w1"):
        core.send(attach(worker))
        if worker == "w0":
            with pytest.raises(Stale, match="not known yet"):
                core.open("w0", free=False)
    core.open("w0", free=False, shard_size=100)
    core.take()
    core.send(join(low=2, high=2))
    with pytest.raises(Stale):
        core.take("w0", p.Ack(1, 50))
    for worker in ("w0", "w1"):
        core.send(attach(worker, save_to="/tree", stored=(stored(4),)))
        with pytest.raises(Stale):
            core.take("w0", p.Ack(1, 50))
    assert core.state.jobs["job"].attempt == 2
    loaded(core, "w0", (0, 40))
    loaded(core, "w1")
    with pytest.raises(Stale, match="fence 1"):
        core.take("w0", p.Ack(1, 50))
    with pytest.raises(Stale, match="not opened"):
        core.take("w0", fence=2)
    assert Ranges.decode(core.open("w0", free=False, shard_size=100).done[""]) == Ranges.of([(0, 40)])
    assert core.open("w1", free=False, shard_size=100) == p.Ledger(fence=2), "only rank 0 keeps what was restored"
    assert spans(core.take("w1", fence=2, count=2)) == [(40, 140), (140, 240)]


def test_a_model_that_saw_samples_twice_is_not_restored() -> None:
    """Two images hold the same positions: that generation is given up, loudly, and its parts are forgotten."""
    core = Core()
    restoring(core)
    loaded(core, "w0", (0, 40))
    loaded(core, "w1", (30, 60))
    job = core.state.jobs["job"]
    assert "seen them twice" in job.plan.fallbacks[0]
    assert job.plan.restore is None
    assert core.open("w0", free=False) == p.Ledger(fence=job.attempt)
    assert spans(core.take(fence=job.attempt))[0][0] == 0


def test_parts_of_a_refused_restore_are_dropped() -> None:
    core = Core()
    core.send(join())
    for worker in ("w0", "w1"):
        core.send(attach(worker, save_to="/tree", stored=(stored(4), stored(8))))
    loaded(core, "w0", (0, 40))
    core.send(p.Loaded("job", "w1", 1, False, "hash"))
    loaded(core, "w0", (0, 10))
    loaded(core, "w1", (10, 20))
    assert Ranges.decode(core.open("w0", free=False).done[""]) == Ranges.of([(0, 20)])


def test_a_damaged_cut_is_refused() -> None:
    core = Core()
    restoring(core)
    with pytest.raises(BadRequest, match="damaged"):
        core.send(p.Loaded("job", "w0", 1, True, cuts={"data": {"": "nonsense"}}))
    assert not core.state.jobs["job"].rounds.round.members["w0"].loaded  # type: ignore[union-attr]


@pytest.mark.parametrize("parts", [(p.Partition("other", end=100),), (p.Partition(end=30),)])
def test_a_cut_of_another_dataset_is_refused(parts: tuple[p.Partition, ...]) -> None:
    """Nothing that was trained on is forgotten in silence."""
    core = Core()
    restoring(core)
    loaded(core, "w0", (0, 40))
    loaded(core, "w1")
    with pytest.raises(BadRequest, match="restored checkpoint"):
        core.open(free=False, epoch_length=0, partitions=parts)


def test_bad_ranges_stay_known_and_data_may_change_where_none_was_used() -> None:
    """What cannot be read is not tried again by the next attempt; another dataset is fine if nothing is done."""
    core = Core()
    restoring(core)
    loaded(core, "w0", (0, 40))
    loaded(core, "w1")
    core.open(end=100, free=False, shard_size=20)
    for _ in range(3):
        got = core.take(fence=2).leases[0]
        if got.lo == 40:
            core.take("w0", p.Ack(got.id, 40, failed="io", failed_upto=50), fence=2, count=0)
    restoring(core)
    loaded(core, "w0", (0, 20))
    loaded(core, "w1")
    with pytest.raises(BadRequest, match=r"'f'.*'g'"):
        core.open(end=100, free=False, fingerprint="g")
    core.open(end=100, free=False, shard_size=20)
    assert core.ledger.books[""].next == 50
    assert spans(core.take(fence=3, count=3)) == [(20, 40), (50, 70), (70, 90)]
    core.send(join(), None)
    for worker in ("w0", "w1"):
        core.send(attach(worker, save_to="/tree"))
    core.open(end=200, free=False, fingerprint="g", shard_size=20)
    assert spans(core.take(fence=4)) == [(0, 20)]


def test_free_holders_are_not_rolled_back() -> None:
    """Asynchronous work goes on through an attempt of the seated ones."""
    core = Core()
    core.open("f", shard_size=100)
    lease = core.take("f").leases[0]
    restoring(core)
    loaded(core, "w0")
    loaded(core, "w1")
    assert core.take("f", p.Ack(lease.id, 100), count=0).state is p.LedgerState.OPEN
    assert core.ledger.books[""].done.size == 100


def test_the_first_death_of_a_round_counts() -> None:
    """The others die of the break, not of what they held: their ranges are not suspected."""
    core = Core()
    core.send(join())
    for worker in ("w0", "w1"):
        core.send(attach(worker))
    for worker in ("w0", "w1"):
        core.open(worker, free=False, shard_size=100)
        core.take(worker)
    core.send(Lost("job", "w0"))
    core.send(Lost("job", "w1"))
    assert [piece.losses for piece in core.ledger.books[""].returned] == [1, 0]
    assert not math.isinf(core.state.jobs["job"].alarm)


def test_losses_are_remembered_through_attempts() -> None:
    """A range that kills a member each time is found, although every attempt starts with an empty ledger."""
    core, sizes = Core(), []
    for attempt in range(1, 5):
        life = f"life{attempt}-"
        core.send(join(lives=life))
        for index in range(2):
            core.send(attach(f"{life}{index}"))
        core.open(f"{life}0", free=False, shard_size=80)
        (lease,) = core.take(f"{life}0", fence=attempt).leases
        sizes.append(lease.hi - lease.lo)
        core.send(Lost("job", f"{life}0"))
    assert sizes == [80, 80, 40, 20]


def test_a_stream_cannot_end_before_what_is_done() -> None:
    """The source contradicts itself, or is another one: refused, nothing changed. What was lent behind is void."""
    core = Core()
    parts = (p.Partition("a"), p.Partition("b", end=30))
    core.open(epoch_length=0, partitions=parts, shard_size=20)
    assert [(lease.partition, lease.lo, lease.hi) for lease in core.take(count=3).leases] == [
        ("a", 0, 20),
        ("b", 0, 20),
        ("a", 20, 40),
    ]
    core.take("w0", p.Ack(1, 20), count=0)
    before = job_registry.encode(core.state)
    with pytest.raises(BadRequest, match="20 are done"):
        core.open("w1", epoch_length=0, partitions=(p.Partition("a", end=19), parts[1]))
    assert job_registry.encode(core.state) == before
    core.open("w1", epoch_length=0, partitions=(p.Partition("a", end=22), parts[1]))
    assert core.take("w0", p.Ack(3, 22), p.Ack(2, 10, back=True), count=0).state is p.LedgerState.OPEN
    got = core.take("w0", count=9, rate=0.1)
    assert [(lease.partition, lease.lo, lease.hi) for lease in got.leases] == [("b", 10, 20), ("b", 20, 30)]
    core.send(p.Leave("job", "w0", p.Departure.STOPPED))
    assert [(lease.lo, lease.hi) for lease in core.take("w1", count=9).leases] == [(10, 20), (20, 30)]
