"""A keeper's segments by worker (`seat`: its local rank) and the images that they hold. Loop thread only. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from dlrover_hooks.checkpoint.memory.checksums import digests_beside
from dlrover_hooks.checkpoint.memory.segment import SharedSegment, Slot
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot, SlotStates, image_identity
from dlrover_hooks.checkpoint.state.safetensors_header import holds_shards
from dlrover_hooks.protocol import Generation, Held


class Segment(SlotStates):
    """Shared memory and the states of its slots. `seat`: the worker's local rank; `home`: for replicas, its node."""

    def __init__(self, seat: int, shared: SharedSegment, *, home: str = "") -> None:
        super().__init__(seat, shared)
        self.shared, self.home = shared, home
        self.retired = False
        """A replaced trainer may still write it."""
        self.given_up = False
        """No trainer writes it any more; its slots are freed one by one if memory is short."""

    @property
    def writable(self) -> bool:
        """Whether the registered trainer may write it."""
        return not (self.retired or self.given_up)

    def sharded(self, slot: Slot) -> bool:
        """Whether it holds parts of tensors."""
        return holds_shards(self.shared.view(slot.index, slot.image_bytes))

    def forget(self, run: str) -> None:
        """Free the slots of other runs; for a retired segment drop only the hashes: a trainer may still write it."""
        for slot in self.shared.slots():
            if slot.torn or slot.generation is None or slot.generation.run != run:
                self.drop(slot.index)
                if not self.retired:
                    self.shared.free(slot.index)

    def holds(self, generation: Generation | None) -> bool:
        return any(proof.slot.generation == generation for proof in self.valid())


class Found(NamedTuple):
    segment: Segment
    proof: HashedSlot


def prove(shared: SharedSegment, index: int, seq: int) -> HashedSlot | None:
    """Hash slot `index` as it was at `seq`; None if it is free, torn, or was written since. Any thread."""
    slot = shared.slot(index)
    if slot.generation is None or slot.torn or slot.seq != seq:
        return None
    chunks = digests_beside(shared.view(index, slot.image_bytes))
    return HashedSlot(slot, chunks) if shared.seq(index) == slot.seq else None


class ReplicaSlot(NamedTuple):
    """The slot for an incoming replica, and the digests of its old content and of the other slot."""

    segment: Segment
    slot: int
    inside: tuple[str, ...] = ()
    beside: HashedSlot | None = None


class Replicas:
    """Images of other nodes' workers: two slots for each, so that the newest complete one always stays."""

    def __init__(self) -> None:
        self._seats: dict[tuple[str, int], list[Segment]] = {}
        """By home node and local rank there; the largest segment last."""
        self._filling: set[tuple[str, int]] = set()

    def segments(self) -> list[Segment]:
        return [segment for segments in self._seats.values() for segment in segments]

    def fits(self, home: str, seat: int, nbytes: int) -> bool:
        """Whether there is a segment for images of `nbytes`."""
        segments = self._seats.get((home, seat))
        return segments is not None and segments[-1].shared.slot_bytes >= nbytes

    def has(self, home: str, seat: int, rank: int, generation: Generation, chunks: tuple[str, ...]) -> bool:
        """Whether this same image is here already."""
        wanted = generation, rank, chunks
        proofs = [proof for segment in self._seats.get((home, seat), ()) for proof in segment.valid()]
        return any((proof.slot.generation, proof.slot.rank, proof.chunks) == wanted for proof in proofs)

    def add(self, segment: Segment) -> None:
        """Add a larger segment; the previous one stays until the new one holds an image."""
        self._seats.setdefault((segment.home, segment.seat), []).append(segment)

    def begin(self, home: str, seat: int) -> ReplicaSlot | None:
        """The slot for the next image. It counts as torn until `end`.

        None: another one is in progress, or `forget` or `outlive` came between `add` and this.
        """
        key = home, seat
        if key in self._filling or key not in self._seats:
            return None
        segment = self._seats[key][-1]
        whole = {proof.slot.index: proof for proof in segment.valid()}
        newest = max(whole.values(), key=lambda proof: age(proof.slot.generation), default=None)
        index = 1 if newest is not None and newest.slot.index == 0 else 0
        inside = whole[index].chunks if index in whole else ()
        segment.drop(index)
        segment.shared.begin(index)
        self._filling.add(key)
        return ReplicaSlot(segment, index, inside, newest)

    def end(self, berth: ReplicaSlot, proof: HashedSlot | None) -> None:
        """The slot was filled; if not (None), it is freed."""
        segment = berth.segment
        key = segment.home, segment.seat
        self._filling.discard(key)
        if proof is None:
            segment.shared.free(berth.slot)
        elif segment.accept(proof):
            segment.supersede(berth.slot)
            self._seats[key] = [segment]

    def outlive(self, before: Generation | None, now: Generation) -> None:
        """`now` is memory-complete, after `before`: drop images of workers that have none of this attempt.

        After the second generation of an attempt, no generation of an older attempt is complete on its nodes any more.
        So the replicas of nodes that no longer send to this one are of no use.
        """
        if before is None or (before.run, before.attempt) != (now.run, now.attempt) or before == now:
            return
        for key, segments in list(self._seats.items()):
            newest = max((age(proof.slot.generation) for one in segments for proof in one.valid()), default=(-1, -1))
            if newest[0] < now.attempt and key not in self._filling:
                del self._seats[key]

    def forget(self, run: str) -> None:
        """Drop the images of runs other than `run`."""
        for segment in self.segments():
            if (segment.home, segment.seat) not in self._filling:
                segment.forget(run)
        self._seats = {key: found for key, found in self._seats.items() if key in self._filling or found[-1].proofs}


class SegmentRegistry:
    """Segments by local rank, the current one last. Older ones are kept only as long as they are needed."""

    def __init__(self) -> None:
        self.seats: dict[int, list[Segment]] = {}
        self.complete: Generation | None = None
        self.replicas = Replicas()
        self.damage: list[str] = []
        """Reports of damage for the next trainer to log."""

    def current(self, seat: int) -> Segment | None:
        """The newest segment that the worker's trainer may write."""
        segments = self.seats.get(seat)
        return segments[-1] if segments and segments[-1].writable else None

    def numbered(self, seat: int, number: int) -> Segment | None:
        """The worker's segment of that number, if its trainer may write it; 0: the newest."""
        mine = [one for one in self.seats.get(seat, []) if one.shared.number == number and one.writable]
        return mine[0] if mine else self.current(seat) if not number else None

    def add(self, segment: Segment) -> None:
        """Make `segment` current. The best older one stays until `segment` holds a memory-complete generation."""
        older = self.seats.get(segment.seat, [])
        best = max(older, key=self._worth, default=None)
        self.seats[segment.seat] = [best, segment] if best is not None else [segment]

    def give_up(self, seat: int, busy: Collection[Generation]) -> Iterator[None]:
        """Free the worker's slots that no restore needs, one per iteration, the oldest first.

        The newest image stays, and the newest complete generation, those that may become complete, and those in `busy`.
        The trainer must not write any of its segments any more.
        """
        found: list[tuple[tuple[int, int], int, Segment]] = []
        for segment in self.seats.get(seat, []):
            if not segment.retired:
                segment.given_up = True
                found += [(age(one.generation), one.index, segment) for one in segment.shared.slots()]
        found.sort(key=lambda row: row[0])
        for row in found[:-1]:
            _, index, segment = row
            if not segment.needed(segment.shared.slot(index), self.complete, busy):
                segment.drop(index)
                segment.shared.release(index)
                yield

    def given_up_bytes(self, seat: int) -> int:
        """Bytes that become free once the segments go that the trainer has given up."""
        return sum(
            segment.shared.slot_bytes
            for segment in self.seats.get(seat, [])
            for slot in segment.shared.slots()
            if segment.given_up and slot.generation is not None
        )

    def _worth(self, segment: Segment) -> tuple[bool, tuple[int, int]]:
        ages = [age(proof.slot.generation) for proof in segment.valid()]
        return segment.holds(self.complete), max(ages, default=(-1, -1))

    def completed(self, generation: Generation) -> None:
        """`generation` is memory-complete: drop the older segments of workers whose current one holds it."""
        self.replicas.outlive(self.complete, generation)
        self.complete = generation
        for seat, segments in self.seats.items():
            if segments[-1].holds(generation):
                self.seats[seat] = segments[-1:]

    def held(self) -> tuple[Held, ...]:
        """Every hashed slot of this node, including replicas of other nodes' images."""
        return tuple(
            Held(
                slot.generation,
                slot.rank,
                slot.world_size,
                segment.seat,
                slot.index,
                sharded=segment.sharded(slot),
                home=segment.home,
            )
            for segment in (*self._segments(), *self.replicas.segments())
            for slot, _ in segment.valid()
            if slot.generation is not None
        )

    def find(self, generation: Generation, rank: int, world_size: int) -> Found | None:
        """The hashed slot with `rank`'s image of `generation`: this node's own, or a replica.

        A single-rank image can be held for several local ranks. The lowest is used: rank 0's batch statistics count, if
        it lives.
        """
        own = (segment for seat in sorted(self.seats) for segment in reversed(self.seats[seat]))
        for segment in (*own, *self.replicas.segments()):
            for proof in segment.valid():
                if image_identity(proof.slot) == (generation, rank, world_size):
                    return Found(segment, proof)
        return None

    def roll_back(self, seat: int, *, retired: bool = False) -> None:
        """The trainer of the worker's (`retired`) segments is gone: free torn slots."""
        for segment in self.seats.get(seat, []):
            for slot in segment.shared.slots():
                if slot.torn and segment.retired == retired:
                    segment.shared.free(slot.index)

    def unproved(self, seat: int) -> list[tuple[Segment, int]]:
        """The worker's complete slots whose content was not hashed yet."""
        return [
            (segment, slot.index)
            for segment in self.seats.get(seat, [])
            for slot in segment.shared.slots()
            if not (slot.torn or slot.generation is None or segment.given_up or segment.proved(slot))
        ]

    def forget(self, run: str, *, sparing: Collection[int] = ()) -> None:
        """Free the slots of other runs, but not those of the local ranks `sparing`. The newest segments stay."""
        if self.complete is not None and self.complete.run != run:
            self.complete = None
        self.replicas.forget(run)
        for seat, segments in self.seats.items():
            if seat not in sparing:
                for segment in segments:
                    segment.forget(run)
                self.seats[seat] = [one for one in segments if one.proofs or one is segments[-1]]

    def newest_whole(self) -> tuple[Generation, list[Found]] | None:
        """The newest generation of which this node holds all ranks' slots, hashed; in the order of ranks."""
        worlds: dict[tuple[Generation, int], dict[int, Found]] = {}
        for segment in self._segments():
            for proof in segment.valid():
                if proof.slot.generation is not None:
                    key = (proof.slot.generation, proof.slot.world_size)
                    worlds.setdefault(key, {})[proof.slot.rank] = Found(segment, proof)
        whole = [key for key, ranks in worlds.items() if ranks.keys() == set(range(key[1]))]
        if self.complete is not None:  # a run that was dropped for a fresh one must not return
            whole = [key for key in whole if key[0].run == self.complete.run]
        if not whole:
            return None
        best = max(whole, key=lambda key: age(key[0]))
        return best[0], [worlds[best][rank] for rank in range(best[1])]

    def _segments(self) -> list[Segment]:
        return [segment for segments in self.seats.values() for segment in segments]


def age(generation: Generation | None) -> tuple[int, int]:
    """Sort key of generations of one run; None is the oldest."""
    return (generation.attempt, generation.step) if generation is not None else (-1, -1)
