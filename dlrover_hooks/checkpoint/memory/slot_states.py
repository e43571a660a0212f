"""The state of each image in a segment, from its publication until its slot is written again. Pure.

An image is a slot at one sequence number. The keeper's loop thread only.

    event                                                    from -> to
    the trainer publishes it: `published`                    any -> unhashed; a copy in another slot -> void
    it is hashed: `accept`                                   unhashed -> valid, or -> void if a chunk is damaged
    it is hashed again: `accept`                             valid -> valid, or -> void if a chunk differs
    it is damaged when it is read, written or sent: `refute` any -> void
    its slot is about to be freed or filled: `drop`          any -> none
    its slot is written: the slot table                      any -> none

A file is no part of this: it belongs to a generation and outlives the slot, because a generation that is saved again
is not written again (`PersistQueue`, which tells what is `busy`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, first_difference, inside
from dlrover_hooks.checkpoint.memory.segment import Slot
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation

_DAMAGED = "damaged"
"""In place of a hash: equals no chunk's hash."""


class HashedSlot(NamedTuple):
    """A slot and its chunk digests at the moment of hashing."""

    slot: Slot
    chunks: tuple[str, ...]


def image_identity(slot: Slot) -> tuple[Generation | None, int, int]:
    """Identity of an image. A single-rank image (world size 1) is not the image of rank 0 in a larger world."""
    return slot.generation, slot.rank, slot.world_size


class Publication(NamedTuple):
    """A publication of a slot: its sequence number, that of the one before it, and the chunks that were not copied."""

    seq: int
    before: int | None
    unchanged: frozenset[int]


class SlotTable(Protocol):
    """What a trainer writes beside its images: see `SharedSegment`."""

    def seq(self, index: int) -> int: ...
    def slot(self, index: int) -> Slot: ...
    def slots(self) -> Sequence[Slot]: ...


class SlotStates:
    """See the module. `seat`: the worker's local rank."""

    def __init__(self, seat: int, table: SlotTable) -> None:
        self.seat, self._table = seat, table
        self.proofs: dict[int, HashedSlot] = {}
        """By slot; also of slots that were written since."""
        self._void: dict[int, int] = {}
        """By slot, the sequence number of a superseded or damaged image; its hash may still be in progress."""
        self._known: dict[int, dict[int, str]] = {}
        """By slot, the hashes of the chunks that were not written since they were hashed."""
        self._published: dict[int, Publication] = {}
        """By slot, the last one that was read."""

    def valid(self) -> list[HashedSlot]:
        """The hashes of slots that were not written since."""
        return [proof for index, proof in self.proofs.items() if self._table.seq(index) == proof.slot.seq]

    def proved(self, slot: Slot) -> bool:
        """Whether the current content of `slot` is hashed, or void."""
        proof = self.proofs.get(slot.index)
        return self._is_void(slot) or (proof is not None and proof.slot.seq == slot.seq)

    def needed(self, slot: Slot, complete: Generation | None, busy: Collection[Generation]) -> bool:
        """Whether a restore or a pending file may need `slot`. `complete`: the newest complete one, if any is known."""
        if slot.torn or slot.generation is None or self._is_void(slot):
            return False
        if complete is None or slot.generation in busy:
            return True
        return slot.generation.run == complete.run and slot.generation >= complete

    def published(self, index: int, seq: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Slot `index` was published with `seq`; all of it but `ranges` was written."""
        self.supersede(index)
        chunks = inside(ranges, self._table.slot(index).image_bytes)
        last = self._published.get(index)
        self._published[index] = Publication(seq, last.seq if last is not None else None, chunks)
        before = self._known.get(index, {})
        self._known[index] = {chunk: digest for chunk, digest in before.items() if chunk in chunks}

    def supersede(self, index: int) -> None:
        """Slot `index` was published: an older image of the same generation and rank in another slot becomes void."""
        new = self._table.slot(index)
        self._void.pop(index, None)  # the table is ahead of the messages: it may be void by mistake
        for old in self._table.slots():
            if old.index != index and image_identity(old) == image_identity(new):
                self.proofs.pop(old.index, None)
                self._void[old.index] = old.seq

    def accept(self, proof: HashedSlot) -> bool:
        """Keep `proof`, unless its slot is superseded or a newer hash came first.

        Raises:
            Corrupt: a chunk differs from its earlier hash, although the image is the same or the chunk was not copied
                again; names slot and chunk. The slot no longer counts.
        """
        slot, chunks = proof
        if self._is_void(slot):
            return False
        old = self.proofs.get(slot.index)
        if old is not None and old.slot.seq >= slot.seq:
            if old.slot.seq == slot.seq and (bad := first_difference(chunks, old.chunks)) is not None:
                self.refute(slot)
                raise Corrupt(f"{self._name(slot)}: chunk {bad} did not match its hash")
            return False
        last, before = self._published.get(slot.index), self._known.pop(slot.index, {})
        kept = sorted(before.keys() & last.unchanged) if last is not None and last.seq == slot.seq else []
        if bad := [chunk for chunk in kept if before[chunk] != chunks[chunk]]:
            self.refute(slot)
            raise Corrupt(f"{self._name(slot)}: chunk {bad[0]}, not copied again, changed since it was hashed")
        late = last is not None and last.seq > slot.seq
        self._known[slot.index] = self._still_known(proof) | (before if late else {})
        self.proofs[slot.index] = proof
        return True

    def _still_known(self, proof: HashedSlot) -> dict[int, str]:
        """The hashes of the chunks that were not written since. None of them after two later publications: only the
        chunks of the last one are known."""
        known, last = dict(enumerate(proof.chunks)), self._published.get(proof.slot.index)
        if last is None or last.seq <= proof.slot.seq:
            return known
        unchanged = last.unchanged if last.before == proof.slot.seq else frozenset[int]()
        return {chunk: digest for chunk, digest in known.items() if chunk in unchanged}

    def refute(self, slot: Slot) -> None:
        """The content of `slot` is damaged: neither it nor chunks left unchanged by the next save count as valid."""
        if self._table.seq(slot.index) == slot.seq:
            self._void[slot.index] = slot.seq
            self._known[slot.index] = dict.fromkeys(range(-(-slot.image_bytes // CHUNK_BYTES)), _DAMAGED)
        proof = self.proofs.get(slot.index)
        if proof is not None and proof.slot.seq <= slot.seq:  # otherwise it is that of a newer image
            del self.proofs[slot.index]

    def drop(self, index: int) -> None:
        """Slot `index` is about to be written or freed, or is of no use any more."""
        self.proofs.pop(index, None)

    def _is_void(self, slot: Slot) -> bool:
        return self._void.get(slot.index) == slot.seq

    def _name(self, slot: Slot) -> str:
        return f"slot {slot.index} of seat {self.seat}, {slot.generation}, rank {slot.rank}"
