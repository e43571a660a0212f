"""Leased shards of holders without a seat, of epochs and of streams: in the books each position is done once."""

from __future__ import annotations

import collections

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, precondition, rule

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.master.core.leased_data.partitions import MOST_FAILURES
from tests.property.shard_world import DATA, JOB, ShardWorld

LENGTH, EPOCHS = 20, 2
ENDS = {"a": (5, 31), "b": (0, 17)}


class Free(ShardWorld):
    """Holders come and go, acknowledge in parts, are late, lose leases: what is told done is told once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, dict[int, tuple[p.Lease, int]]] = {}
        self.told: collections.Counter[tuple[str, int]] = collections.Counter()
        self.failed: collections.Counter[tuple[str, int]] = collections.Counter()
        self.stream = False
        self.ended = False

    @initialize(stream=st.booleans(), batch=st.integers(1, 3), shard=st.sampled_from([4, 9, 0]))
    def first(self, stream: bool, batch: int, shard: int) -> None:
        self.stream, self.batch, self.shard = stream, batch, shard
        self.come()

    @property
    def epochs(self) -> int:
        return 1 if self.stream else EPOCHS

    def opening(self, name: str, *, ended: bool) -> p.OpenLedger:
        parts = (p.Partition(end=LENGTH * EPOCHS),)
        if self.stream:
            parts = tuple(p.Partition(key, lo, hi if ended else None) for key, (lo, hi) in ENDS.items())
        length = 0 if self.stream else LENGTH
        return p.OpenLedger(JOB, name, DATA, "f", parts, length, self.batch, self.shard, free=True)

    def is_far(self) -> bool:
        """Handed out as far as the end that nobody knows, or nearly."""
        return self.ledger is not None and any(self.ledger.books[key].next > hi - 9 for key, (_, hi) in ENDS.items())

    @rule()
    def come(self) -> None:
        name = self.named("f")
        self.send(self.opening(name, ended=False))
        self.held[name] = {}

    @precondition(lambda self: any(self.held.values()))
    @rule(who=st.integers(0, 9))
    def come_again(self, who: int) -> None:
        """What it held comes back."""
        name = sorted(self.held)[who % len(self.held)]
        self.send(self.opening(name, ended=False))
        self.held[name] = {}

    @precondition(lambda self: self.stream and bool(self.held) and not self.ended and self.is_far())
    @rule()
    def tell_the_end(self) -> None:
        """Refused only if somebody said that positions behind are done."""
        behind = any(at >= ENDS[key][1] for key, at in self.told)
        try:
            self.send(self.opening(sorted(self.held)[0], ended=True))
        except BadRequest:
            assert behind or any(at >= ENDS[key][1] for key, at in self.failed)
            return
        assert not behind
        self.ended = True
        self.held[sorted(self.held)[0]] = {}

    @precondition(lambda self: bool(self.held))
    @rule(
        who=st.integers(0, 9),
        count=st.integers(0, 6),
        epoch=st.integers(0, EPOCHS - 1),
        share=st.floats(0.0, 1.0),
        how=st.sampled_from(["part", "part", "back", "failed"]),
    )
    def work(self, who: int, count: int, epoch: int, share: float, how: str) -> None:
        """Say how far the oldest lease is, and take more."""
        name = sorted(self.held)[who % len(self.held)]
        acks: tuple[p.Ack, ...] = ()
        for lease, at in list(self.held[name].values())[:1]:  # one at a time: it may have run out
            hi = min(lease.hi, ENDS[lease.partition][1]) if self.ended else lease.hi
            upto = max(at, at + int(share * (hi - at)))
            fails = how == "failed" and upto < hi
            acks = (p.Ack(lease.id, upto, "bad" if fails else "", back=how == "back" or upto >= hi),)
        if self.send_acks(name, acks, count, min(epoch, self.epochs - 1)):
            self.note(name, acks)

    def send_acks(self, name: str, acks: tuple[p.Ack, ...], count: int, epoch: int) -> bool:
        try:
            reply = self.send(p.TakeLeases(JOB, name, DATA, 1, count, epoch, acks, rate=0.05))
        except Stale:
            for ack in acks:
                del self.held[name][ack.lease]
            return False
        assert isinstance(reply, p.Leases)
        for lease in reply.leases:
            assert lease.lo < lease.hi
            self.held[name][lease.id] = (lease, lease.lo)
        return True

    def note(self, name: str, acks: tuple[p.Ack, ...]) -> None:
        for ack in acks:
            lease, at = self.held[name][ack.lease]
            self.told.update((lease.partition, position) for position in range(at, ack.upto))
            assert max(self.told.values(), default=0) <= 1, "a position was done twice"
            if ack.failed:
                self.failed[lease.partition, ack.upto] += 1
            if ack.failed or ack.back or ack.upto == lease.hi:
                del self.held[name][ack.lease]
            else:
                self.held[name][ack.lease] = (lease, ack.upto)

    @precondition(lambda self: bool(self.held))
    @rule(who=st.integers(0, 9), how=st.sampled_from(["lost", "done", "preempted"]))
    def go(self, who: int, how: str) -> None:
        name = sorted(self.held)[who % len(self.held)]
        self.send(Lost(JOB, name) if how == "lost" else p.Leave(JOB, name, p.Departure(how)))
        lease_ids = list(self.held.pop(name))
        before = job_registry.encode(self.state)
        try:
            self.send(p.TakeLeases(JOB, name, DATA, 1, 1, acks=tuple(p.Ack(one, 30) for one in lease_ids)))
        except Stale:
            assert job_registry.encode(self.state) == before
        else:
            raise AssertionError("a worker that has left was heard")

    @rule(seconds=st.sampled_from([1.0, 50.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.tick(seconds)

    @rule()
    def kill_the_master(self) -> None:
        self.restart()

    def teardown(self) -> None:
        """A last holder works to the end: every position is done once, or was given up and is told."""
        if self.ledger is None:
            return
        for name in sorted(self.held):
            self.send(Lost(JOB, name))
        self.held = {"last": {}}
        self.send(self.opening("last", ended=False))
        if self.stream and not self.ended:
            self.tell_the_end()
        if self.stream and not self.ended:
            return
        bad = {place for epoch in range(self.epochs) for place in self.finish(epoch)}
        spans = ENDS if self.stream else {"": (0, LENGTH * EPOCHS)}
        for key, (lo, hi) in spans.items():
            for at in range(lo, hi):
                assert self.told[key, at] == ((key, at) not in bad), f"{key} {at}"
        assert all(self.failed[place] >= MOST_FAILURES for place in bad)

    def finish(self, epoch: int) -> set[tuple[str, int]]:
        for _ in range(200):
            reply = self.send(p.TakeLeases(JOB, "last", DATA, 1, 4, epoch))
            assert isinstance(reply, p.Leases)
            if reply.state is p.LedgerState.FINISHED:
                return {(one.partition, at) for one in reply.quarantined for at in range(one.lo, one.hi)}
            self.held["last"] = {lease.id: (lease, lease.lo) for lease in reply.leases}
            acks = tuple(p.Ack(lease.id, lease.hi) for lease in reply.leases)
            self.send(p.TakeLeases(JOB, "last", DATA, 1, 0, epoch, acks))
            self.note("last", acks)
        raise AssertionError("it never ends")


TestFree = Free.TestCase
TestFree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
