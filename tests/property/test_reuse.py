"""The reuse rule against the real master: what is whole on all ranks stays, and saves never stop.

Ranks save in lockstep, as training does. How long hashing, votes and answers take, and which slots are being persisted,
is the test's choice; reporters, core and `choose_slot` are the real ones.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed
from dlrover_hooks.checkpoint.memory.segment import SLOTS, Slot
from dlrover_hooks.checkpoint.memory.slot_policy import FARTHEST, MEETING, Heard, choose_slot
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.errors import MasterAway
from dlrover_hooks.testing import MasterFake
from dlrover_hooks.worker.reporter import Reporter, _Saved, _Skipped
from tests.e2e.job_script import attach, join

RUN, OLD = "a" * 32, "b" * 32
GENERATIONS = st.builds(p.Generation, st.integers(0, 2), st.integers(0, 4), st.sampled_from([RUN, OLD]))
LINES = st.tuples(st.booleans(), st.none() | GENERATIONS)


@given(
    st.lists(LINES, min_size=SLOTS, max_size=SLOTS),
    st.none() | GENERATIONS,
    st.sets(GENERATIONS, max_size=2),
    st.none() | st.frozensets(GENERATIONS, max_size=3),
    st.integers(5, 40),
)
def test_chosen_slot_is_never_a_needed_one(
    lines: list[tuple[bool, p.Generation | None]],
    complete: p.Generation | None,
    persisting: set[p.Generation],
    hopeless: frozenset[p.Generation] | None,
    step: int,
) -> None:
    slots = [Slot(i, 2 * i + torn, generation, 1, 0, 1) for i, (torn, generation) in enumerate(lines)]
    saved = p.Generation(2, step, RUN)
    index = choose_slot(slots, Heard(complete, hopeless), persisting, saved)
    free = [slot for slot in slots if slot.torn or slot.generation is None]
    if index is None:
        assert len(free) < 2
        return
    chosen = slots[index].generation
    if free:
        assert slots[index] in free
        return
    assert chosen is not None
    assert chosen not in persisting
    if any(other.generation == chosen and other.seq > slots[index].seq for other in slots):
        return  # the keeper uses that copy
    assert chosen != complete
    if hopeless is None:
        newest = max((s.generation for s in slots if s.generation and s.generation.run == RUN), default=None)
        assert newest is None or chosen != newest
    elif chosen.run == RUN and chosen.attempt == 2 and (complete is None or chosen > complete or complete.run != RUN):
        assert chosen in hopeless


@pytest.mark.parametrize("alone", [True, False])
def test_of_copies_of_one_generation_only_the_last_one_stays(alone: bool) -> None:
    """At the end a generation is saved again; with a copy in each slot, no save of the next launch found a free one."""
    twice = p.Generation(1, 2, RUN)
    slots = [Slot(index, seq, twice, 1, 0, 1) for index, seq in enumerate((4, 8, 6))]
    heard = Heard(twice, None if alone else frozenset())
    for saved in (p.Generation(1, 2, RUN), p.Generation(2, 2, RUN), p.Generation(2, 3, RUN)):
        assert choose_slot(slots, heard, (), saved) in (0, 2)
        assert choose_slot(slots, heard, (twice,), saved) is None


class Engine:
    """What a reporter tells its rank's engine; heard when the test says so."""

    def __init__(self) -> None:
        self.generations = GenerationTracker()

    def begin_session(self) -> GenerationTracker:
        return self.generations

    def complete(self, generation: p.Generation) -> None:
        self.generations.complete_here = generation

    def fail_if_keeper_gone(self) -> None:
        """Nothing is ever lost of what is to be persisted."""


class Rank:
    """Slots, a keeper that hashes in order, a reporter; `heard` is what its training thread knows."""

    def __init__(self, rank: int, world: int, master: MasterFake) -> None:
        self.slots = [Slot(index, 0) for index in range(SLOTS)]
        self.heard, self.skipped, self.away = Heard(), 0, False
        self.heard_too_late = False
        """What it sends while the master is away does reach it, but is not answered."""
        self._to_hash: deque[Hashed] = deque()
        self._rank, self._world, self._master = rank, world, master
        self._engine = Engine()
        self.generations = self._engine.generations
        self._reporter = Reporter(self, "job", (f"w{rank}", rank, world), self._engine)  # type: ignore[arg-type]

    def call(self, request: p.Message, **_: Any) -> p.Message:
        if self.away:
            error = MasterAway("nobody answers")
            error.reached = self.heard_too_late
            if error.reached:
                self._master.call(request)
            raise error
        return self._master.call(request)

    @property
    def whole(self) -> set[p.Generation]:
        return {slot.generation for slot in self.slots if slot.generation is not None}

    def save(self, generation: p.Generation) -> bool:
        index = self._engine.generations.choose_slot(self.slots, self.heard, generation)
        if index is None:
            self.skipped += 1
            self._reporter._take(_Skipped(generation))
            return False
        self.slots[index] = Slot(index, 2, generation, 1, self._rank, self._world)
        self._reporter._take(_Saved(generation, durable=False))
        self._to_hash.append(Hashed(generation=generation, rank=self._rank, world_size=self._world))
        return True

    def hash(self) -> None:
        if self._to_hash:
            self._reporter._take(self._to_hash.popleft())

    def deliver(self) -> None:
        self._reporter._deliver()

    def beat(self) -> None:
        self._reporter._beat()

    def hear(self) -> None:
        self.heard = self.generations.heard(alone=False)

    def lose_keeper(self) -> None:
        """What it held is gone with it, hashed or not; the next save goes to a new one."""
        self.slots = [Slot(index, 0) for index in range(SLOTS)]
        self._to_hash.clear()
        self.persisted()
        self.generations.complete_here = None
        self.hear()

    def persist(self, generation: p.Generation) -> None:
        self.generations.ordered(generation)

    def persisted(self) -> None:
        for generation in self.generations.pending:
            self.generations.ended(generation, stored=True)

    def settle(self) -> None:
        while self._to_hash:
            self.hash()
        self.deliver()
        self.beat()
        self.hear()


class Cluster:
    """All ranks of a world, from attempt 1 on, which restores nothing."""

    def __init__(self, world: int) -> None:
        self.master = MasterFake()
        self.master.call(join("a", world, lives="w", low=world, high=world))
        for rank in range(world):
            self.master.call(attach(f"w{rank}", save_every=1))
        self.run = self.master.state.jobs["job"].run
        self.ranks = [Rank(rank, world, self.master) for rank in range(world)]
        for rank in self.ranks:
            rank.beat()
            rank.hear()
        self.step = self.lost_at = 0
        self.away_at = -MEETING - 1
        """When a rank was last without its master."""
        self.published: list[set[p.Generation]] = [set() for _ in range(world)]

    @property
    def floor(self) -> p.Generation | None:
        """The newest one that all ranks have published."""
        return max(set.intersection(*self.published), default=None)

    def whole(self) -> p.Generation | None:
        """What a restore would find."""
        return max(set.intersection(*(rank.whole for rank in self.ranks)), default=None)

    def save(self, order: list[int]) -> None:
        self.step += 1
        generation = p.Generation(1, self.step, self.run)
        for number in order:
            if self.ranks[number].save(generation):
                self.published[number].add(generation)
            self.check()

    def check(self) -> None:
        """While the master is away a rank may write over what it has not voted for; never over what is complete."""
        found = f"step {self.step}: {[sorted(g.step for g in r.whole) for r in self.ranks]}"
        complete = self.master.call(p.ShowJob("job")).newest_complete
        if complete is not None and complete.step > self.lost_at:
            assert (self.whole() or complete) >= complete, f"{found}, complete is {complete}"
            assert self.whole() is not None, f"{found}, complete is {complete}"
        if self.step > self.away_at + MEETING and not any(rank.away for rank in self.ranks):
            assert self.whole() == self.floor, found
        elif self.whole() != (floor := self.floor):
            for published in self.published:
                published.discard(floor)


class Lockstep(RuleBasedStateMachine):
    """Any interleaving: nothing that was whole on all ranks is lost before something newer is."""

    @initialize(world=st.integers(1, 3))
    def start(self, world: int) -> None:
        self.cluster = Cluster(world)

    @property
    def ranks(self) -> list[Rank]:
        return self.cluster.ranks

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        self.cluster.save(data.draw(st.permutations(range(len(self.ranks)))))

    @rule(data=st.data(), what=st.sampled_from(["hash", "deliver", "beat", "hear", "settle", "settle"]))
    def go_on(self, data: st.DataObject, what: str) -> None:
        getattr(data.draw(st.sampled_from(self.ranks)), what)()

    @rule(data=st.data())
    def persist(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.whole and not rank.generations.pending:
            rank.persist(data.draw(st.sampled_from(sorted(rank.whole))))

    @rule(data=st.data())
    def persisted(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.ranks)).persisted()

    @rule(data=st.data())
    def lose_keeper(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.ranks) - 1))
        self.ranks[number].lose_keeper()
        self.cluster.published[number].clear()
        self.cluster.lost_at = self.cluster.step

    @rule(data=st.data(), away=st.booleans(), heard_too_late=st.booleans())
    def go_away(self, data: st.DataObject, away: bool, heard_too_late: bool) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        self.cluster.away_at = self.cluster.step
        rank.away, rank.heard_too_late = away, heard_too_late

    @invariant()
    def the_newest_is_there(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    @precondition(lambda self: hasattr(self, "cluster") and self.cluster.step > 3)
    @rule()
    def saves_go_on(self) -> None:
        """From here on each rank hears all before the next save: soon something new is whole."""
        for rank in self.ranks:
            rank.away = False
        before = self.cluster.step
        for _ in range(2 * FARTHEST + 2):
            for rank in self.ranks:
                rank.settle()
            self.cluster.save(list(range(len(self.ranks))))
        floor = self.cluster.floor
        assert floor is not None
        assert floor.step > before


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("lags", [(0, 0), (0, 3), (1, 1), (2, 5), (3, 0), (6, 6), (9, 9), (12, 7), (20, 15)])
def test_two_ranks_that_have_one_slot_each_meet_again(lags: tuple[int, int]) -> None:
    """Both have lost a slot to a slow store, and rank 0 one save; each hears so many saves late what it is told."""
    cluster, told = Cluster(2), [deque([Heard(hopeless=frozenset())] * lag) for lag in lags]

    def save() -> None:
        for rank, heard in zip(cluster.ranks, told, strict=True):
            rank.settle()
            heard.append(rank.heard)
            rank.heard = heard.popleft()
        cluster.save([0, 1])

    save()
    for rank in cluster.ranks:
        for generation in rank.whole:
            rank.persist(generation)
    second = p.Generation(1, 2, cluster.run)
    cluster.ranks[0].persist(second)
    save()
    save()
    cluster.ranks[0].generations.ended(second, stored=True)
    gaps, newest = [0], cluster.floor
    for _ in range(1000):
        save()
        gaps.append(gaps[-1] + 1 if cluster.floor == newest else 0)
        newest = cluster.floor
    assert max(gaps) <= 4 * MEETING + 6 * max(lags)
    assert max(lags) == 0 or any(rank.skipped for rank in cluster.ranks)


def test_while_the_master_is_away_saves_go_on() -> None:
    """And the newest that all have stays, as long as no rank leaves one out."""
    cluster = Cluster(2)
    for step in range(20):
        for rank in cluster.ranks:
            rank.away = step >= 5
            rank.settle()
        cluster.save([0, 1])
    assert [rank.skipped for rank in cluster.ranks] == [0, 0]
    assert cluster.floor == p.Generation(1, 20, cluster.run)


class Votes:
    """Three ranks vote by hand."""

    def __init__(self) -> None:
        self.cluster = Cluster(3)

    def __call__(self, rank: int, step: int, passed: int, kind: p.VoteKind = p.VoteKind.MEMORY) -> tuple[int, ...]:
        generation = p.Generation(1, step, self.cluster.run)
        reply = self.cluster.master.call(p.Vote("job", f"w{rank}", generation, rank, 3, kind, passed=passed))
        beat = self.cluster.master.call(p.Heartbeat("job", f"w{rank}"))
        assert isinstance(beat, p.Beat)
        assert beat.may_complete == reply.may_complete
        return reply.may_complete

    @property
    def newest_complete(self) -> int | None:
        newest = self.cluster.master.call(p.ShowJob("job")).newest_complete
        return newest.step if newest else None


def test_what_may_complete_is_told_to_all() -> None:
    """A rank that has passed a step by makes it hopeless; one that is late does not."""
    vote = Votes()
    assert vote(0, 1, 2) == (1,)
    assert vote(0, 2, 3) == (1, 2)
    assert vote(1, 2, 1) == (1, 2), "rank 1 is still hashing step 1"
    assert vote(2, 2, 3, p.VoteKind.SKIPPED) == ()
    assert vote(1, 1, 3) == (), "too late for step 1: rank 2 has passed it by"
    assert vote(0, 3, 4) == (3,)
    assert vote(1, 3, 4) == (3,)
    assert vote(2, 3, 4) == (), "complete"
    assert vote(1, 2, 4) == (), "older than what is complete"


def test_what_was_called_hopeless_never_gets_complete() -> None:
    """Others may have given it up by then."""
    vote = Votes()
    vote(0, 5, 6)
    assert vote(1, 3, 4) == (5,), "rank 0 passed step 3 by before anybody voted for it"
    vote(2, 5, 6, p.VoteKind.SKIPPED)
    for rank in (1, 2):
        assert vote(rank, 5, 6) == ()
    assert vote.newest_complete is None


def test_many_hopeless_ones_do_not_push_out_one_that_is_late() -> None:
    vote = Votes()
    vote(0, 1, 2)
    vote(1, 1, 2)
    for step in range(2, 20):
        vote(step % 2, step, step + 1)
    assert vote(0, 20, 21)[0] == 1
    vote(2, 1, 2)
    assert vote.newest_complete == 1
