"""Any order of events: what a node's keeper never does with an image, from its publication to its file.

The keeper's own parts, on real slot tables. The test plays the trainers, the store and the threads: a job runs when it
says, and its outcome arrives when it says. Chunks of an image are numbers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.keeper import emergency_flush, hasher, persist_queue
from dlrover_hooks.checkpoint.keeper.emergency_flush import EmergencyFlush
from dlrover_hooks.checkpoint.keeper.request_handlers import RequestHandlers
from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.memory.keeper_segments import Found, Segment, SegmentRegistry
from dlrover_hooks.checkpoint.memory.segment import SLOTS, SharedSegment, Slot
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot, image_identity
from dlrover_hooks.checkpoint.storage import shard_writer
from dlrover_hooks.errors import Corrupt, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, ShardFile

RUN, SEATS, CHUNKS = "a" * 32, 2, 2
NBYTES = CHUNKS * CHUNK_BYTES
SELDOM = st.sampled_from((False, False, False, True))
Place = tuple[int, int, int]
"""An image in memory: segment number, slot, sequence number."""


class Jobs:
    """A `ThreadPool` of two threads, or of one that never runs ahead."""

    def __init__(self) -> None:
        self.waiting, self.done = deque[Any](), deque[Any]()

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.done)

    def submit(self, job: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.waiting.append((job, then))

    def run(self, number: int = 0) -> None:
        job, then = self.waiting[number]
        del self.waiting[number]
        try:
            self.done.append((then, job()))
        except AssertionError:
            raise
        except Exception as error:
            self.done.append((then, error))

    def deliver(self) -> Any:
        then, outcome = self.done.popleft()
        then(outcome)
        return outcome


class Trainer:
    """One worker's trainer: what it has sent and was not read yet, and what it has heard."""

    def __init__(self, seat: int) -> None:
        self.seat, self.wire = seat, deque[keeper_messages.KeeperMessage]()
        self.hello = keeper_messages.Hello(seat=seat, job="job", run=RUN, save_to="somewhere")
        self.peer: Any = SimpleNamespace(hello=self.hello, replaced=False)
        self.hashed: list[Generation] = []
        self.unanswered = set[Generation]()


class Keeper(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.hash_jobs, self.store_jobs, self.open_jobs = Jobs(), Jobs(), Jobs()
        patches = (
            mock.patch.object(hasher, "ThreadPool", return_value=self.hash_jobs),
            mock.patch.object(persist_queue, "ThreadPool", return_value=self.store_jobs),
            mock.patch.object(hasher, "prove", self.prove),
            mock.patch.object(shard_writer, "persist", self.persist),
            mock.patch.object(shard_writer, "last_will", self.last_will),
            mock.patch.object(shard_writer, "verify", self.verify),
            mock.patch.object(emergency_flush, "_log"),
        )
        self.patches = [patch for patch in patches if patch.start()]
        self.registry, self.damage = SegmentRegistry(), set[Place]()
        self.hashes = hasher.SlotHasher(lambda call: call(), self.hash_ended)
        self.shards = persist_queue.PersistQueue(lambda call: call(), self.tell)
        self.flush_now, self.stored_before = self.shards.last_will, set[int]()
        self.shards.last_will = self.flush_begins
        saving = Trainer(0).hello
        self.flush = EmergencyFlush(self.registry, self.hashes, self.shards, lambda: saving)
        loop: Any = SimpleNamespace(tell=self.tell, send=lambda *_: None, peers=())
        rooms: Any = SimpleNamespace(grow=lambda _: None, look_at_disk=lambda *_: None)
        jobs: Any = self.open_jobs
        nothing: Any = None
        self.handlers = RequestHandlers(
            loop, self.registry, nothing, self.hashes, self.shards, rooms, jobs, self.flush, nothing
        )
        self.values, self.step = itertools.count(1), 0
        self.memory = dict[tuple[int, int], list[int]]()
        """By segment number and slot, the chunks that are there."""
        self.flipped = set[tuple[int, int]]()
        """Slots with a bit that flipped since all of it was last copied."""
        self.superseded, self.lost = set[Place](), set[Place]()
        """Images that were saved again elsewhere; those that did not count any more as memory was short."""
        self.stored: dict[tuple[Generation, int], set[int]] = {}
        """By generation and world size, the ranks whose files the keeper has to remember: the newest."""
        self.broken = False
        self.trainers: dict[int, Trainer] = {}
        for seat in range(SEATS):
            self.registry.add(self.new_segment(seat))
            self.trainers[seat] = Trainer(seat)

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    def new_segment(self, seat: int) -> Segment:
        return Segment(seat, SharedSegment.create(seat, 1))

    # ---- the threads, and the store

    def prove(self, shared: SharedSegment, index: int, seq: int) -> HashedSlot | None:
        slot = shared.slot(index)
        if slot.generation is None or slot.torn or slot.seq != seq:
            return None
        return HashedSlot(slot, tuple(map(str, self.memory[shared.number, index])))

    def verify(self, found: Found) -> HashedSlot:
        slot, chunks = found.proof
        now = found.segment.shared.seq(slot.index), tuple(map(str, self.memory[self.at(found)[:2]]))
        if now != (slot.seq, chunks):
            raise shard_writer.NotAsHashed(found, "damaged, or overwritten")
        return found.proof

    def persist(self, found: Found, *_: Any, **__: Any) -> ShardFile:
        """What a worker has ordered."""
        slot = found.proof.slot
        assert slot.generation is not None
        assert slot.rank not in self.stored.get((slot.generation, slot.world_size), ()), f"{slot} is written again"
        return self.write_file(found)

    def write_file(self, found: Found) -> ShardFile:
        slot = found.proof.slot
        if self.at(found) not in self.lost:
            assert found.segment.shared.seq(slot.index) == slot.seq, f"{slot} was said to be free"
        self.verify(found)
        if self.broken:
            raise StorageFailed("broken")
        assert slot.generation is not None
        return ShardFile(
            f"{slot.generation.step} {slot.world_size}", slot.rank, NBYTES, CHUNK_BYTES, found.proof.chunks
        )

    def flush_begins(self, ranks: list[Found], generation: Generation, *args: Any, **more: Any) -> None:
        self.stored_before = set(self.stored.get((generation, len(ranks)), ()))
        self.flush_now(ranks, generation, *args, **more)

    def last_will(self, ranks: list[Found], generation: Generation, *, known: Any, **_: Any) -> Manifest:
        assert known.keys() >= self.stored_before, "known files are written again"
        files = tuple(known.get(found.proof.slot.rank) or self.write_file(found) for found in ranks)
        if self.broken:
            raise StorageFailed("broken")
        assert [file.rank for file in files] == list(range(ranks[0].proof.slot.world_size))
        return Manifest("job", generation, len(ranks), files, 0.0)

    def at(self, found: Found) -> Place:
        return found.segment.shared.number, found.proof.slot.index, found.proof.slot.seq

    # ---- the loop

    def hash_ended(self, segment: Segment, _: int, proof: HashedSlot | Exception | None) -> None:
        assert not isinstance(proof, Exception)
        if proof is None or segment not in self.registry.seats[segment.seat]:
            return
        place = self.at(Found(segment, proof))
        try:
            accepted = segment.accept(proof)
        except Corrupt:
            overwritten = segment.shared.seq(proof.slot.index) != proof.slot.seq
            assert overwritten or place[:2] in self.flipped, "a false alarm"
            self.damage.add(place)
            return
        assert not accepted or place not in self.damage | self.superseded
        if accepted and segment.seat in self.trainers and proof.slot.generation is not None:
            self.trainers[segment.seat].hashed.append(proof.slot.generation)

    def tell(self, seat: int, notice: keeper_messages.KeeperMessage) -> None:
        if isinstance(notice, keeper_messages.Persisted | keeper_messages.PersistFailed) and seat in self.trainers:
            self.trainers[seat].unanswered.discard(notice.generation)

    def serve(self, trainer: Trainer) -> None:
        message = trainer.wire.popleft()
        self.handlers.take(trainer.peer, message)
        if isinstance(message, keeper_messages.Published):
            segment = self.registry.current(trainer.seat)
            assert segment is not None
            new, number = segment.shared.slot(message.slot), segment.shared.number
            older = [
                old
                for old in segment.shared.slots()
                if old.index != new.index and image_identity(old) == image_identity(new)
            ]
            self.superseded |= {(number, old.index, old.seq) for old in older}
            self.superseded.discard((number, new.index, new.seq))

    def serve_all(self, trainer: Trainer) -> None:
        while trainer.wire:
            self.serve(trainer)

    # ---- the trainers

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), alone=SELDOM, again=SELDOM, kept=st.sets(st.integers(0, CHUNKS - 1)))
    def save(self, data: st.DataObject, alone: bool, again: bool, kept: set[int]) -> None:
        """`alone`: a single-rank image. `again`: of the newest step, as after its file failed."""
        self.save_one(data.draw(st.sampled_from(sorted(self.trainers))), data, kept, alone=alone, again=again)

    @rule(data=st.data(), kept=st.sets(st.integers(0, CHUNKS - 1)))
    def save_on_all(self, data: st.DataObject, kept: set[int]) -> None:
        """And all that was saved so far is hashed."""
        for seat in sorted(self.trainers):
            self.save_one(seat, data, kept, alone=False, again=seat > 0)
            self.serve_all(self.trainers[seat])
        while self.hash_jobs.pending:
            self.hash()

    def save_one(self, seat: int, data: st.DataObject, kept: set[int], *, alone: bool, again: bool) -> None:
        trainer = self.trainers[seat]
        segment = self.registry.current(trainer.seat)
        assert segment is not None
        free = [slot for slot in segment.shared.slots() if self.may_overwrite(slot, trainer)]
        if not free:
            return
        self.step += not again or not self.step
        slot = data.draw(st.sampled_from(free))
        here = segment.shared.number, slot.index
        kept = kept if here in self.memory else set()
        segment.shared.begin(slot.index)
        before = self.memory.setdefault(here, [0] * CHUNKS)
        self.memory[here] = [before[chunk] if chunk in kept else next(self.values) for chunk in range(CHUNKS)]
        self.flipped -= {here} if not kept else set()
        rank, world = (0, 1) if alone else (trainer.seat, SEATS)
        segment.shared.publish(slot.index, Generation(0, self.step, RUN), rank, world, NBYTES)
        unchanged = tuple((chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES) for chunk in sorted(kept))
        seq = segment.shared.seq(slot.index)
        trainer.wire.append(keeper_messages.Published(slot=slot.index, seq=seq, unchanged=unchanged))

    def may_overwrite(self, slot: Slot, trainer: Trainer) -> bool:
        return slot.generation is None or slot.generation not in self.shards.under_way(trainer.seat)

    @rule(data=st.data(), all_=st.booleans())
    def read(self, data: st.DataObject, all_: bool) -> None:
        if speaking := [trainer for trainer in self.trainers.values() if trainer.wire]:
            trainer = data.draw(st.sampled_from(speaking))
            for _ in range(len(trainer.wire) if all_ else 1):
                self.serve(trainer)

    @rule(data=st.data(), read=st.booleans())
    def persist_one(self, data: st.DataObject, read: bool) -> None:
        """Its trainer was told that it is hashed. It may be asked for twice."""
        if able := [trainer for trainer in self.trainers.values() if trainer.hashed]:
            trainer = data.draw(st.sampled_from(able))
            generation = data.draw(st.sampled_from(trainer.hashed[-SLOTS:]))
            trainer.unanswered.add(generation)
            trainer.wire.append(
                keeper_messages.Persist(generation=generation, rank=trainer.seat, world_size=SEATS, url="somewhere")
            )
            if read:
                self.serve_all(trainer)

    @precondition(lambda self: self.trainers)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        trainer = self.trainers[data.draw(st.sampled_from(sorted(self.trainers)))]
        common = set[Generation].intersection(*(self.hashed_by(seat) for seat in range(SEATS)))
        if common:
            trainer.wire.append(keeper_messages.Complete(generation=max(common)))
            self.serve_all(trainer)

    def hashed_by(self, seat: int) -> set[Generation]:
        segments = self.registry.seats[seat]
        return {proof.slot.generation for one in segments for proof in one.valid() if proof.slot.generation}

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), torn=st.booleans(), silent=st.booleans())
    def die(self, data: st.DataObject, torn: bool, silent: bool) -> None:
        """`torn`: while it writes a slot. `silent`: before its last message."""
        trainer = self.trainers[data.draw(st.sampled_from(sorted(self.trainers)))]
        segment = self.registry.current(trainer.seat)
        assert segment is not None
        free = [slot for slot in segment.shared.slots() if self.may_overwrite(slot, trainer)]
        if torn and free:
            segment.shared.begin(data.draw(st.sampled_from(free)).index)
        if silent and trainer.wire:
            trainer.wire.pop()
        self.serve_all(trainer)
        del self.trainers[trainer.seat]
        self.registry.roll_back(trainer.seat)
        for one, index in self.registry.unproved(trainer.seat):
            self.hashes.submit(one, index, one.shared.seq(index))
        self.flush.trainer_died()

    @rule(seat=st.integers(0, SEATS - 1))
    def start(self, seat: int) -> None:
        """A new trainer waits for the hashes."""
        while self.hash_jobs.pending:
            self.hash()
        if seat not in self.trainers:
            self.shards.give_way(seat)
            self.trainers[seat] = Trainer(seat)

    @precondition(lambda self: self.trainers)
    @rule(data=st.data())
    def squeeze(self, data: st.DataObject) -> None:
        """The state has outgrown the slots, and memory is short."""
        trainer = self.trainers[data.draw(st.sampled_from(sorted(self.trainers)))]
        self.serve_all(trainer)
        segments = self.registry.seats[trainer.seat]
        valid = [(one, proof.slot) for one in segments for proof in one.valid()]
        void = [(one, slot) for one in segments for slot in one.shared.slots() if (one, slot) not in valid]
        self.lost |= {(one.shared.number, slot.index, slot.seq) for one, slot in void}
        busy, complete = self.shards.under_way(trainer.seat), self.registry.complete
        for _ in self.registry.give_up(trainer.seat, busy):
            pass
        for one, slot in valid:
            if one.shared.seq(slot.index) != slot.seq:
                assert slot.generation is not None
                assert slot.generation not in busy, f"{slot} is being written"
                assert complete is not None, f"{slot} may become complete"
                assert slot.generation < complete, f"{slot} may be needed"
        self.registry.add(self.new_segment(trainer.seat))

    @rule(data=st.data())
    def open_image(self, data: st.DataObject) -> None:
        if self.trainers and self.step:
            trainer = self.trainers[data.draw(st.sampled_from(sorted(self.trainers)))]
            step = data.draw(st.integers(max(self.step - SLOTS, 1), self.step))
            trainer.wire.append(
                keeper_messages.OpenImage(generation=Generation(0, step, RUN), rank=trainer.seat, world_size=SEATS)
            )

    # ---- the world

    @precondition(lambda self: self.memory)
    @rule(data=st.data(), chunk=st.integers(0, CHUNKS - 1))
    def flip_a_bit(self, data: st.DataObject, chunk: int) -> None:
        here = data.draw(st.sampled_from(list(self.memory)))
        self.memory[here][chunk] = next(self.values)
        self.flipped.add(here)

    @rule(broken=st.booleans())
    def break_store(self, broken: bool) -> None:
        self.broken = broken

    @precondition(lambda self: self.hash_jobs.pending)
    @rule()
    def hash(self) -> None:
        if self.hash_jobs.waiting:
            self.hash_jobs.run()
        self.hash_jobs.deliver()

    @precondition(lambda self: self.hash_jobs.waiting)
    @rule(first=st.booleans())
    def hash_but_say_nothing_yet(self, first: bool) -> None:
        self.hash_jobs.run(0 if first else min(1, len(self.hash_jobs.waiting) - 1))

    @precondition(lambda self: self.open_jobs.pending)
    @rule()
    def verify_one(self) -> None:
        self.open_jobs.run()
        self.ended(self.open_jobs.deliver())

    @precondition(lambda self: self.store_jobs.waiting)
    @rule(first=st.booleans())
    def write(self, first: bool) -> None:
        self.store_jobs.run(0 if first else min(1, len(self.store_jobs.waiting) - 1))

    @precondition(lambda self: self.store_jobs.done)
    @rule()
    def write_ended(self) -> None:
        self.ended(self.store_jobs.deliver())

    @precondition(lambda self: self.store_jobs.pending)
    @rule()
    def write_all(self) -> None:
        while self.store_jobs.pending:
            if self.store_jobs.waiting:
                self.write(first=True)
            self.write_ended()

    def ended(self, outcome: Any) -> None:
        if isinstance(outcome, shard_writer.NotAsHashed):
            self.damage.add(self.at(outcome.found))
        if isinstance(outcome, ShardFile):
            step, world = map(int, outcome.name.split())
            self.stored.setdefault((Generation(0, step, RUN), world), set()).add(outcome.rank)
            while len(self.stored) > SLOTS:
                self.stored.pop(next(iter(self.stored)))

    @invariant()
    def each_order_is_answered(self) -> None:
        if not (self.hash_jobs.pending or self.store_jobs.pending):
            for trainer in self.trainers.values():
                asked = {one.generation for one in trainer.wire if isinstance(one, keeper_messages.Persist)}
                assert trainer.unanswered <= asked

    @invariant()
    def what_counts_is_what_was_published(self) -> None:
        for segments in self.registry.seats.values():
            for segment in segments:
                for proof in segment.valid():
                    place = self.at(Found(segment, proof))
                    assert segment.shared.slot(proof.slot.index) == proof.slot, "overwritten"
                    assert place not in self.damage, "damaged"
                    assert place not in self.superseded, "superseded"


TestKeeper = Keeper.TestCase
TestKeeper.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
