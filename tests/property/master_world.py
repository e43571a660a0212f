"""A whole job as hypothesis sees it: agents come and go, workers attach, load, vote, die; the journal writes along."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterError
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.effects import CommitGeneration, Effect, WriteFinished
from dlrover_hooks.master.core.events import (
    CommitFailed,
    Committed,
    EndSlow,
    EndStalled,
    Envelope,
    FinishWritten,
    Key,
    Lost,
    Reshare,
    Tick,
    encode,
)
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.protocol.ranges import Ranges
from tests.e2e.job_script import attach, held, join, shard, stored

NODES = ("a", "b", "c")
LOW, HIGH = 2, 4


class World(RuleBasedStateMachine):
    """Drives the core with valid and invalid events alike; a refused event must leave every byte as it was."""

    folder: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.journal = SqliteJournal(None)
        self.state = job_registry.Master()
        self.now = 1000.0
        self.lives = 0
        self.seq = 0
        self.everybody: list[str] = []
        self.commits: list[CommitGeneration] = []
        self.ends: list[WriteFinished] = []
        self.last_event: tuple[p.Message, Key | None] | None = None

    def teardown(self) -> None:
        self.journal.close()

    @property
    def job(self) -> Job | None:
        return self.state.jobs.get("job")

    def send(self, event: p.Message, *, key: Key | None = None) -> p.Message | None:
        """Apply and journal; None if the core refused."""
        before = job_registry.encode(self.state)
        try:
            outcome = job_registry.apply(self.state, event, self.now, key)
        except MasterError:
            assert job_registry.encode(self.state) == before, f"a refused {type(event).__name__} changed the state"
            return None
        if not outcome.repeated:
            self.journal.append([encode(Envelope(now=self.now, event=event, key=key))])
        self._note(outcome.effects)
        self.last_event = event, key
        return outcome.reply

    def _note(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, CommitGeneration):
                self.commits.append(effect)
            elif isinstance(effect, WriteFinished):
                self.ends.append(effect)

    def members(self, *, live: bool = True) -> list[str]:
        current = self.job.rounds.round if self.job else None
        if current is None:
            return []
        return sorted(name for name, member in current.members.items() if member.live or not live)

    # ---- rules -------------------------------------------------------------------------------------------------------

    @rule(
        node=st.sampled_from(NODES),
        count=st.integers(1, 3),
        again=st.booleans(),
        last_call_s=st.sampled_from([0.0, 1.0]),
    )
    def join(self, node: str, count: int, again: bool, last_call_s: float) -> None:
        """An agent asks for seats, with its living workers or with new ones."""
        mine = [name for name in self.members() if name.split(".")[0] == node] if again else []
        names = mine[:count]
        while len(names) < count:
            self.lives += 1
            names.append(f"{node}.{self.lives}")
        self.everybody += names
        seats = tuple(p.Seat(incarnation=name, local_rank=index) for index, name in enumerate(names))
        self.send(join(node, seats=seats, low=LOW, high=HIGH, last_call_s=last_call_s))

    @rule(counts=st.tuples(st.integers(1, 2), st.integers(1, 2)))
    def come_up(self, counts: tuple[int, int]) -> None:
        """Two nodes join again, the third is gone, all attach and load: the way to training, rarely found by a walk."""
        for name in self.members():
            self.send(Lost(job="job", incarnation=name))
        for node in NODES:
            self.send(Lost(job="job", incarnation=node))
        for node, count in zip(NODES, counts, strict=False):
            self.join(node, count, False, 0.0)
        self.tick(0.0)
        for name in self.members():
            self.send(attach(name, name.split(".")[0], save_to="/tree", persist_every=2, save_every=1))
        for name in self.members():
            assert self.job is not None
            self.send(p.Loaded(job="job", incarnation=name, round=self.job.rounds.number, ok=True))

    @rule(seconds=st.floats(0.0, 2.0))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick(job="job"))

    @rule(data=st.data(), how=st.sampled_from(["lost", "stalled", "slow", "rebalanced", "exited", "failed", "stopped"]))
    def die(self, data: st.DataObject, how: str) -> None:
        if not self.everybody:
            return
        name = data.draw(st.sampled_from(self.everybody[-8:]))
        if how == "lost":
            self.send(Lost(job="job", incarnation=name))
        elif how == "stalled":
            number = self.job.rounds.number if self.job is not None else 1
            self.send(EndStalled(job="job", round=number, incarnations=tuple(self.everybody[-2:]), step=7))
        elif how == "rebalanced":
            number = self.job.rounds.number if self.job is not None else 1
            shares = data.draw(st.sampled_from([None, p.Shares(8, (p.RankShare(1, 2),))]))
            self.send(Reshare("job", number, name, shares, "slow"))
        elif how == "slow":
            number = self.job.rounds.number if self.job is not None else 1
            policy = data.draw(st.sampled_from([p.StragglerPolicy.RELAUNCH, p.StragglerPolicy.EXCLUDE]))
            here = [one for one in self.everybody if one.split(".")[0] == name.split(".")[0]]
            self.send(EndSlow(job="job", round=number, incarnations=(name, *here[-2:]), policy=policy, reason="slow"))
        elif how == "exited":
            self.send(p.Exited(job="job", incarnation=name.split(".")[0], worker=name, exit_code=-9))
        else:
            self.send(p.Leave(job="job", incarnation=name, reason=p.Departure(how)))

    @rule(node=st.sampled_from(NODES))
    def lose_agent(self, node: str) -> None:
        self.send(Lost(job="job", incarnation=node))

    @precondition(lambda self: bool(self.members()))
    @rule(
        data=st.data(), step=st.integers(0, 12), whole=st.booleans(), everyone=st.booleans(), replicates=st.booleans()
    )
    def attach(self, data: st.DataObject, step: int, whole: bool, everyone: bool, replicates: bool) -> None:
        assert self.job is not None
        assert self.job.rounds.round is not None
        names = self.members() if everyone else [data.draw(st.sampled_from(self.members()))]
        world = len(self.job.rounds.round.members)
        for name in names:
            if self.job.rounds.round.members.get(name) is None:
                continue
            slots = tuple(held(step, rank, world) for rank in range(world if whole else 1))
            node = name.split(".")[0]
            keeper = p.KeeperAddress(f"node-{node}", "127.0.0.1", 7000) if replicates else None
            if replicates:
                slots += (msgspec.structs.replace(held(step, world - 1, world), home="node-z"),)
            more = {"held": slots, "stored": (stored(step // 2),), "keeper": keeper, "secret": p.Secret(f"of {node}")}
            self.send(attach(name, node, save_to="/tree", persist_every=2, save_every=1, **more))

    @precondition(lambda self: bool(self.members()))
    @rule(ok=st.integers(0, 4), everyone=st.booleans(), data=st.data())
    def loaded(self, ok: int, everyone: bool, data: st.DataObject) -> None:
        names = self.members() if everyone else [data.draw(st.sampled_from(self.members()))]
        for name in names:
            assert self.job is not None
            number = self.job.rounds.round.number if self.job.rounds.round else 0
            low = 4 * sum(name.encode()) % 40
            cuts = {"data": {"": Ranges.of([(low, low + 3)]).encode()}}
            self.send(p.Loaded(job="job", incarnation=name, round=number, ok=ok > 0, cuts=cuts))

    @precondition(lambda self: bool(self.members()))
    @rule(
        step=st.integers(1, 12),
        kind=st.sampled_from(p.VoteKind),
        back=st.integers(0, 3).map(lambda value: value == 3),
        everyone=st.booleans(),
        data=st.data(),
    )
    def vote(self, step: int, kind: p.VoteKind, back: bool, everyone: bool, data: st.DataObject) -> None:
        assert self.job is not None
        current = self.job.rounds.round
        assert current is not None
        names = self.members() if everyone else [data.draw(st.sampled_from(self.members()))]
        for name in names:
            rank = current.members[name].rank
            generation = p.Generation(attempt=self.job.attempt - back, step=step, run=self.job.run)
            vote = p.Vote("job", name, generation, rank, current.world_size, kind, shard(rank), step_s=0.1, copy_s=0.01)
            self.seq += 1
            reply = self.send(vote, key=Key(incarnation=name, channel="votes", seq=self.seq))
            assert not (back and reply is not None), "a stale attempt counted"

    @rule(data=st.data(), free=st.booleans(), changed=st.booleans())
    def open_ledger(self, data: st.DataObject, free: bool, changed: bool) -> None:
        """A member opens the dataset, or somebody without a seat another one; sometimes not as the first did."""
        name = data.draw(st.sampled_from(["f1", "f2"] if free or not self.members() else self.members()))
        whole = (p.Partition(end=44 if changed else 40),)
        length, batch = whole[0].end or 0, data.draw(st.integers(1, 2))
        ledger = "stream" if free else "data"
        self.send(p.OpenLedger("job", name, ledger, "f", whole, 0 if free else length, batch, 5, free=free))

    @precondition(lambda self: self.job is not None)
    @rule(data=st.data(), free=st.booleans(), count=st.integers(0, 3), upto=st.integers(0, 5), how=st.integers(0, 4))
    def take(self, data: st.DataObject, free: bool, count: int, upto: int, how: int) -> None:
        """Acknowledge some of what it holds, or of what another holds, and take more."""
        assert self.job is not None
        ledger = self.job.ledgers.named.get("stream" if free else "data")
        if ledger is None or not ledger.holders:
            return
        name = data.draw(st.sampled_from(sorted(ledger.holders)))
        held = sorted(ledger.leases if how == 4 else ledger.holders[name].leases)[:2]
        acks = tuple(
            p.Ack(int(number), ledger.leases[number].lo + upto, "bad" if how == 3 else "", back=how == 2)
            for number in held
        )
        self.seq += 1
        event = p.TakeLeases(
            "job", name, ledger.name, ledger.fence - (how == 1 and upto == 5), count, acks=acks, rate=0.2
        )
        self.send(event, key=Key(incarnation=name, channel="leases", seq=self.seq))

    @precondition(lambda self: self.job is not None and bool(self.job.ledgers.free))
    @rule(data=st.data(), how=st.sampled_from(["lost", "exited", "stopped", "failed"]))
    def lose_free(self, data: st.DataObject, how: str) -> None:
        assert self.job is not None
        name = data.draw(st.sampled_from(sorted(self.job.ledgers.free)))
        if how == "lost":
            self.send(Lost(job="job", incarnation=name))
        elif how == "exited":
            self.send(p.Exited(job="job", incarnation="a", worker=name, exit_code=-9))
        else:
            self.send(p.Leave(job="job", incarnation=name, reason=p.Departure(how)))
        assert name not in self.job.ledgers.free

    @rule()
    def sleep(self) -> None:
        """So long that leases run out."""
        self.tick(700.0)

    @precondition(lambda self: bool(self.commits))
    @rule(ok=st.booleans())
    def store(self, ok: bool) -> None:
        generation = self.commits.pop(0).manifest.generation
        self.send(Committed("job", generation) if ok else CommitFailed("job", generation))

    @precondition(lambda self: bool(self.members()))
    @rule()
    def all_done(self) -> None:
        for name in self.members():
            self.send(p.Leave(job="job", incarnation=name, reason=p.Departure.DONE, step=9))

    @precondition(lambda self: bool(self.ends))
    @rule()
    def end_written(self) -> None:
        self.ends.pop()
        self.send(FinishWritten(job="job"))

    @precondition(lambda self: self.last_event is not None and self.last_event[1] is not None)
    @rule()
    def repeat(self) -> None:
        """The same key changes nothing."""
        assert self.last_event is not None
        before = job_registry.encode(self.state)
        self.send(self.last_event[0], key=self.last_event[1])
        assert job_registry.encode(self.state) == before

    @invariant()
    def counters_agree(self) -> None:
        """The O(1) counters equal what counting gives."""
        current = self.job.rounds.round if self.job else None
        if self.job is None:
            return
        waiting = self.job.rounds.waiting.values()
        assert set(self.job.rounds.seats) == {seat.incarnation for one in waiting for seat in one.join.seats}
        if current is not None:
            members = current.members.values()
            assert current.missing == sum(member.live and not member.rejoined for member in members)
            assert current.attached == sum(member.attached for member in members)
            assert current.loaded == sum(member.loaded for member in members)
            assert current.done == sum(member.gone == "done" for member in members)
