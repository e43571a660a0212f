"""What a keeper answers to its trainers. Loop thread only; all that may take long is a crew's. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

from dlrover_hooks.checkpoint import durable, seats, wire
from dlrover_hooks.checkpoint.arena import SLOTS, Arena, free_memory_bytes
from dlrover_hooks.checkpoint.crew import Crew
from dlrover_hooks.checkpoint.hashes import Hashes
from dlrover_hooks.checkpoint.holdings import Holdings, Proof, Segment
from dlrover_hooks.checkpoint.lifetime import Lifetime
from dlrover_hooks.checkpoint.loop import Loop
from dlrover_hooks.checkpoint.peer import Peer
from dlrover_hooks.checkpoint.place import reason
from dlrover_hooks.checkpoint.shards import Shards
from dlrover_hooks.checkpoint.will import Will
from dlrover_hooks.errors import KeeperAway

_WITHOUT_SEAT = (wire.Hello, wire.Inventory, wire.Open, wire.Goodbye)
_log = logging.getLogger(__name__)


def _log_failure(outcome: Any) -> None:
    if isinstance(outcome, Exception):
        _log.warning("%s", outcome)


class Answers:
    """One method for each request. `saving`: the newest Hello that names a `save_to`."""

    def __init__(
        self,
        loop: Loop,
        holdings: Holdings,
        lifetime: Lifetime,
        hashes: Hashes,
        shards: Shards,
        rooms: Crew,
        will: Will,
    ) -> None:
        self.saving: wire.Hello | None = None
        self._loop, self._holdings, self._lifetime = loop, holdings, lifetime
        self._hashes, self._shards, self._rooms, self._will = hashes, shards, rooms, will

    def take(self, peer: Peer, message: Any) -> None:
        """Do what `message` asks. Raises KeeperAway where `peer` may not ask that."""
        answer = self._answers.get(type(message))
        if answer is None or (peer.hello is None and not isinstance(message, _WITHOUT_SEAT)):
            raise KeeperAway(f"unexpected {type(message).__name__}")
        answer(self, peer, message)

    # ---- who comes and goes

    def _hello(self, peer: Peer, message: wire.Hello) -> None:
        self._loop.sweep(peer)
        if (refused := seats.refused(peer, message, self._loop.peers)) is not None:
            self._loop.send(peer, refused)
            return
        for other in seats.holders(peer, message.seat, self._loop.peers):
            other.replaced = True
            for segment in self._holdings.seats.get(message.seat, []):
                segment.retired = True
            self._loop.send(other, wire.Replaced(pid=peer.pid))
        peer.hello, peer.asked = message, True
        self._lifetime.came(message.seat)
        if message.save_to is not None:
            self.saving = message
        self._welcome(peer, message)

    def _inventory(self, peer: Peer, message: wire.Inventory) -> None:
        self._loop.sweep(peer)
        if (refused := seats.refused(peer, message, self._loop.peers)) is not None:
            self._loop.send(peer, refused)
            return
        if message.master is not None:
            peer.asked = True
            self._lifetime.came()
        self._welcome(peer, message)

    def _welcome(self, peer: Peer, message: wire.Wire) -> None:
        """Answer once all that is published by now is hashed."""

        def answer() -> None:
            held, damage = self._holdings.held(), tuple(self._holdings.damage)
            if peer.hello is not None:
                self._holdings.damage.clear()
            self._loop.send(peer, wire.Welcome(ref=message.ref, held=held, damage=damage, pid=os.getpid()))

        self._hashes.when_done(answer)

    def _drop(self, peer: Peer, message: wire.Drop) -> None:
        if not peer.replaced:
            self._holdings.forget(message.run, sparing=seats.taken(peer, self._loop.peers))
            self._shards.forget(message.run)
            self._will.forget(message.run)
        self._loop.send(peer, wire.Done(ref=message.ref))

    def _goodbye(self, peer: Peer, message: wire.Goodbye) -> None:
        peer.left = True
        if peer.hello is None:
            if message.finished:  # it has found the job finished
                self._lifetime.job_done(seats.taken(peer, self._loop.peers))
        elif message.finished and not peer.replaced:
            self._lifetime.done(peer.hello.seat)
        self._loop.send(peer, wire.Done(ref=message.ref))

    # ---- memory

    def _allocate(self, peer: Peer, message: wire.Allocate) -> None:
        assert peer.hello is not None
        seat = peer.hello.seat
        segment = self._holdings.current(seat)
        if peer.replaced or self._lifetime.ending:
            text = f"seat {seat} was taken over, or the keeper ends"
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=text))
        elif segment is not None and segment.arena.slot_bytes >= message.slot_bytes:
            self._allocated(peer, message, segment)
        elif (free := free_memory_bytes()) < SLOTS * message.slot_bytes:
            text = f"{SLOTS} slots of {message.slot_bytes} bytes do not fit into {free} bytes of free memory"
            hint = "in-memory checkpoints need three times the state's size per worker"
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=text, hint=hint))
        else:
            self._rooms.submit(
                lambda: Arena.create(seat, message.slot_bytes), lambda made: self._made(peer, message, seat, made)
            )

    def _made(self, peer: Peer, message: wire.Allocate, seat: int, made: Arena | Exception) -> None:
        if isinstance(made, Exception):
            text = f"no memory for seat {seat}: {reason(made)}"
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=text))
        elif peer in self._loop.peers and not peer.replaced:
            segment = Segment(seat, made)
            self._holdings.add(segment)
            self._allocated(peer, message, segment)
            self._rooms.submit(made.populate, _log_failure)  # the trainer does so, too, at the same time

    def _allocated(self, peer: Peer, message: wire.Allocate, segment: Segment) -> None:
        busy = self._shards.under_way(segment.seat)
        reply = wire.Allocated(ref=message.ref, complete=self._holdings.complete, persisting=busy)
        self._loop.send(peer, reply, segment.arena.fd)

    def _open(self, peer: Peer, message: wire.Open) -> None:
        found = self._holdings.find(message.generation, message.rank)
        if found is None:
            text = f"{message.generation}, rank {message.rank}, is not held in this node's memory"
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=text))
            return
        self._rooms.submit(
            lambda: durable.verify(found), lambda proof: self._opened(peer, message, found.segment, proof)
        )

    def _opened(self, peer: Peer, message: wire.Open, segment: Segment, proof: Proof | Exception) -> None:
        if isinstance(proof, Exception):
            for old in list(segment.proofs.values()):
                if (old.slot.generation, old.slot.rank) == (message.generation, message.rank):
                    segment.refute(old.slot)
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=str(proof)))
            return
        slot = proof.slot
        reply = wire.Opened(
            ref=message.ref, slot=slot.index, seq=slot.seq, image_bytes=slot.image_bytes, seat=segment.seat
        )
        self._loop.send(peer, reply, segment.arena.fd)

    # ---- generations

    def _published(self, peer: Peer, message: wire.Published) -> None:
        assert peer.hello is not None
        segment = self._holdings.numbered(peer.hello.seat, message.segment)
        if segment is not None and not peer.replaced and 0 <= message.slot < SLOTS:
            seq = message.seq or segment.arena.seq(message.slot)
            segment.published(message.slot, seq, message.unchanged)
            self._hashes.submit(segment, message.slot, seq)

    def _complete(self, peer: Peer, message: wire.Complete) -> None:
        self._holdings.completed(message.generation)

    def _persist(self, peer: Peer, message: wire.Persist) -> None:
        hello = peer.hello
        assert hello is not None
        self._hashes.when_done(lambda: self._persist_hashed(hello, message))

    def _persist_hashed(self, hello: wire.Hello, message: wire.Persist) -> None:
        found = self._holdings.find(message.generation, message.rank)
        if found is None:
            text = f"{message.generation} is not held here any more"
            self._loop.tell(hello.seat, wire.PersistFailed(generation=message.generation, reason=text, gone=True))
            return
        self._shards.persist(found, hello, message)

    _answers: ClassVar[dict[type, Callable[..., None]]] = {
        wire.Hello: _hello,
        wire.Inventory: _inventory,
        wire.Allocate: _allocate,
        wire.Published: _published,
        wire.Complete: _complete,
        wire.Persist: _persist,
        wire.Open: _open,
        wire.Drop: _drop,
        wire.Goodbye: _goodbye,
    }
