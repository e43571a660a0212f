"""Any order of events: what the tracker of one rank's generations never does, against a record kept by the test.

The keeper hashes in the order of the saves, and only what is still in its slot. The master, the other ranks and the
store do whatever the test draws.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlrover_hooks.checkpoint.memory.segment import SLOTS, Slot
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.protocol import Cadence, Generation

RUN = "a" * 32


class Lifecycle(RuleBasedStateMachine):
    """One rank of several: its slots, the keeper's work and the votes, as an observer outside the tracker sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker, self.step, self.attempt = GenerationTracker(), 0, 1
        self.tracker.begin(RUN, 1)
        self.tracker.votes = True
        self.slots = [Slot(index, 0) for index in range(SLOTS)]
        self.to_hash, self.votes = deque[Generation](), deque[tuple[Generation, int]]()
        self.writing, self.stored = set[Generation](), set[Generation]()
        self.known, self.overwritten = set[Generation](), set[Generation]()
        """Memory votes that the master may have; generations that were overwritten when it could not have one."""
        self.complete: Generation | None = None
        self.may_complete = set[int]()
        self.cadence, self.promised = Cadence(every=1), 0

    @property
    def held(self) -> set[Generation]:
        return {slot.generation for slot in self.slots if slot.generation is not None}

    def planned(self, last: Generation | None = None) -> None:
        """What follows from an event in the reporter."""
        for one in self.tracker.plan(self.cadence, last).ordered:
            assert one not in self.writing | self.stored, f"{one} is persisted twice"
            self.writing.add(one)

    @rule(last=st.booleans(), durable=st.booleans())
    def save(self, last: bool, durable: bool) -> None:
        self.step += 1
        saved, before = self.tracker.at(self.step), self.tracker.pending
        index = self.tracker.choose_slot(self.slots, self.tracker.heard(alone=False), saved, last=last)
        if index is None:
            self.tracker.skipped(saved)
            return
        old = self.slots[index].generation
        if old is not None:
            assert old not in self.writing, f"{old} is being written"
            assert old not in before, f"{old} is planned"
            assert old != self.complete, f"{old} is the newest complete one"
            newer = old.attempt == self.attempt and (self.complete is None or old > self.complete)
            assert not newer or old not in self.known or old.step not in self.may_complete, f"{old} may become complete"
            self.overwritten |= {old} - self.known
        self.slots[index] = Slot(index, 2, saved, 1, 0, 2)
        self.tracker.saved(saved)
        self.to_hash.append(saved)
        self.planned(saved if durable and last else None)

    @rule()
    def make_durable(self) -> None:
        """The newest one is the last of the run; it may be on its way already."""
        if (newest := self.tracker.at(self.step)) in self.held:
            self.planned(newest)

    @precondition(lambda self: self.to_hash)
    @rule(everything=st.booleans())
    def hash(self, everything: bool) -> None:
        for _ in range(len(self.to_hash) if everything else 1):
            if (one := self.to_hash.popleft()) in self.held:
                assert self.tracker.current(one) == (one.attempt == self.attempt)
                if self.tracker.current(one):
                    self.tracker.hashed(one)
                    self.votes.append((one, self.tracker.passed))
                    self.planned()

    @precondition(lambda self: self.votes)
    @rule(arrives=st.booleans(), answered=st.booleans(), hopeless=st.booleans(), completes=st.booleans())
    def vote(self, arrives: bool, answered: bool, hopeless: bool, completes: bool) -> None:
        one, passed = self.votes[0]
        if not self.tracker.sending(one):
            assert one in self.overwritten
            self.drop_votes()
            return
        assert one not in self.overwritten, f"{one} was overwritten, and is reported"
        if arrives:
            assert one in self.known or one.step >= self.promised, f"{one} was said to be passed"
            self.promised = max(self.promised, passed)
            if one not in self.known and not hopeless:
                self.may_complete.add(one.step)
            self.known.add(one)
            if completes and one.step in self.may_complete:
                self.complete = max(one, self.complete or one)
        if arrives and answered:
            self.votes.popleft()
            self.hear(one)
        else:
            self.tracker.away = True
            self.tracker.not_delivered(one, may_have_arrived=arrives)
            self.drop_votes()

    def drop_votes(self) -> None:
        self.votes = deque(vote for vote in self.votes if not self.tracker.drop_vote(vote[0]))

    @rule(saves=st.integers(1, 2 * SLOTS))
    def train_without_the_master(self, saves: int) -> None:
        """Nothing arrives; saves go on."""
        self.tracker.away = True
        for _ in range(saves):
            self.save(last=False, durable=False)
            if self.to_hash:
                self.hash(everything=True)

    @rule(arrived=st.booleans(), data=st.data())
    def lose_another_vote(self, arrived: bool, data: st.DataObject) -> None:
        """A vote for a stored, failed or skipped save is not answered: that says nothing of the memory vote before."""
        if voted := sorted(self.known):
            self.tracker.away = True
            self.tracker.not_delivered(data.draw(st.sampled_from(voted)), may_have_arrived=arrived)

    @rule(persist_from=st.none() | st.integers(0, 3), fails=st.booleans())
    def beat(self, persist_from: int | None, fails: bool) -> None:
        if persist_from is not None:
            self.cadence = Cadence(every=1, persist_from=max(self.step - persist_from, 1))
        if fails and self.may_complete:
            self.may_complete.discard(min(self.may_complete))
        self.hear()

    def hear(self, counted: Generation | None = None) -> None:
        self.tracker.away = False
        news = self.tracker.replied(self.complete, tuple(self.may_complete), counted)
        if news is not None:
            assert news == self.complete
            self.tracker.complete_here = news
        self.planned()

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), stored=st.booleans())
    def written(self, data: st.DataObject, stored: bool) -> None:
        one = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(one)
        self.tracker.ended(one, stored=stored)
        if stored:
            self.stored.add(one)
        else:
            assert self.tracker.retry(one)
            assert not self.tracker.retry(one)

    @rule()
    def lose_keeper(self) -> None:
        """All memory is gone; pending files fail."""
        self.slots = [Slot(index, 0) for index in range(SLOTS)]
        for one in self.tracker.pending:
            self.tracker.ended(one, stored=False)
        self.writing.clear()
        self.tracker.complete_here = None

    @rule(behind=st.integers(0, 5))
    def begin_attempt(self, behind: int) -> None:
        """In the same process, with the keeper's memory, at any step: a new session has a new tracker."""
        self.tracker, self.attempt = self.tracker.next_session(), self.attempt + 1
        self.tracker.begin(RUN, self.attempt)
        self.tracker.votes = True
        self.step = max(0, self.step - behind)
        self.cadence = Cadence(every=1)
        assert set(self.tracker.pending) == self.writing
        assert self.tracker.plan(Cadence(every=1, persist_from=1)) == ((), ()), "nothing of this attempt is saved"
        assert self.tracker.passed <= 1, "no step of this attempt is passed"
        self.votes.clear()
        self.known.clear()
        self.may_complete.clear()
        self.promised = 0
        self.complete = self.tracker.complete_here

    @invariant()
    def what_is_being_written_is_pending(self) -> None:
        assert self.writing <= set(self.tracker.pending)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
