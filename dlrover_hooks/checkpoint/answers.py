"""What a keeper answers to its trainers. Loop thread only; all that may take long is a crew's. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

from dlrover_hooks.checkpoint import durable, mounts, seats, wire
from dlrover_hooks.checkpoint.arena import SLOTS
from dlrover_hooks.checkpoint.crew import Crew
from dlrover_hooks.checkpoint.hashes import Hashes
from dlrover_hooks.checkpoint.holdings import Holdings, Proof, Segment, whose
from dlrover_hooks.checkpoint.lifetime import Lifetime
from dlrover_hooks.checkpoint.loop import Loop
from dlrover_hooks.checkpoint.peer import Peer
from dlrover_hooks.checkpoint.replication import Replication
from dlrover_hooks.checkpoint.rooms import Rooms
from dlrover_hooks.checkpoint.shards import Shards
from dlrover_hooks.checkpoint.will import Will
from dlrover_hooks.errors import KeeperAway

_WITHOUT_SEAT = (wire.Hello, wire.Inventory, wire.Open, wire.Recall, wire.Goodbye, wire.Replicate, wire.Fetch)
_log = logging.getLogger(__name__)


class Answers:
    """One method for each request. `saving`: the newest Hello that names a `save_to`."""

    def __init__(
        self,
        loop: Loop,
        holdings: Holdings,
        lifetime: Lifetime,
        hashes: Hashes,
        shards: Shards,
        rooms: Rooms,
        openings: Crew,
        will: Will,
        replication: Replication,
    ) -> None:
        self.saving: wire.Hello | None = None
        self._loop, self._holdings, self._lifetime = loop, holdings, lifetime
        self._hashes, self._shards, self._will = hashes, shards, will
        self._rooms, self._openings, self._replication = rooms, openings, replication

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
        if message.replicate is not None:
            with contextlib.suppress(KeeperAway):  # said when it is asked for; saves go on without
                self._replication.follow(message.replicate)
        self._welcome(peer, message)

    def _inventory(self, peer: Peer, message: wire.Inventory) -> None:
        self._loop.sweep(peer)
        if (refused := seats.refused(peer, message, self._loop.peers)) is not None:
            self._loop.send(peer, refused)
            return
        if message.master is not None:
            peer.asked = True
            self._lifetime.came()
        self._welcome(peer, message, waits=message.waits)

    def _welcome(self, peer: Peer, message: wire.Wire, *, waits: bool = True) -> None:
        """Answer once all that is published by now is hashed, or at once."""

        def answer() -> None:
            held, damage = self._holdings.held(), tuple(self._holdings.damage)
            if peer.hello is not None and waits:
                self._holdings.damage.clear()
            left = self._hashes.pending_bytes
            reply = wire.Welcome(ref=message.ref, held=held, damage=damage, pid=os.getpid(), unhashed_bytes=left)
            self._loop.send(peer, reply)

        if waits:
            self._hashes.when_done(answer)
        else:
            answer()

    def _drop(self, peer: Peer, message: wire.Drop) -> None:
        if not peer.replaced:
            self._holdings.forget(message.run, sparing=seats.taken(peer, self._loop.peers))
            self._shards.forget(message.run)
            self._will.forget(message.run)
            mounts.forget()
        self._loop.send(peer, wire.Done(ref=message.ref))

    def _goodbye(self, peer: Peer, message: wire.Goodbye) -> None:
        peer.finished = message.finished
        if peer.hello is None:
            if message.finished:  # it has found the job finished
                self._lifetime.job_done(seats.taken(peer, self._loop.peers))
        elif message.finished and not peer.replaced:
            self._lifetime.done(peer.hello.seat)
        self._loop.send(peer, wire.Done(ref=message.ref))

    # ---- memory

    def _allocate(self, peer: Peer, message: wire.Allocate) -> None:
        self._rooms.allocate(peer, message)

    def _open(self, peer: Peer, message: wire.Open) -> None:
        found = self._holdings.find(message.generation, message.rank, message.world_size)
        if found is None:
            text = f"{message.generation}, rank {message.rank}, is not held in this node's memory"
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=text))
            return
        self._openings.submit(
            lambda: durable.verify(found), lambda proof: self._opened(peer, message, found.segment, proof)
        )

    def _opened(self, peer: Peer, message: wire.Open, segment: Segment, proof: Proof | Exception) -> None:
        if isinstance(proof, Exception):
            for old in list(segment.proofs.values()):
                if whose(old.slot) == (message.generation, message.rank, message.world_size):
                    segment.refute(old.slot)
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=str(proof)))
            return
        slot = proof.slot
        reply = wire.Opened(
            ref=message.ref,
            slot=slot.index,
            seq=slot.seq,
            image_bytes=slot.image_bytes,
            seat=segment.seat,
            at=wire.whereabouts(segment.arena.fd),
        )
        self._loop.send(peer, reply, segment.arena.fd)

    def _recall(self, peer: Peer, message: wire.Recall) -> None:
        segments = (segment for segments in self._holdings.seats.values() for segment in reversed(segments))
        notes = tuple(note for segment in segments for note in segment.arena.notes())
        self._loop.send(peer, wire.Recalled(ref=message.ref, notes=notes))

    # ---- other nodes

    def _replicate(self, peer: Peer, message: wire.Replicate) -> None:
        try:
            port = self._replication.follow(message)
        except KeeperAway as error:
            self._loop.send(peer, wire.Refused(ref=message.ref, reason=error.message, hint=error.hint))
        else:
            self._loop.send(peer, wire.Replicating(ref=message.ref, port=port))

    def _fetch(self, peer: Peer, message: wire.Fetch) -> None:
        def done(error: Exception | None) -> None:
            ref = message.ref
            self._loop.send(peer, wire.Refused(ref=ref, reason=str(error)) if error else wire.Done(ref=ref))

        self._replication.fetch(message, done)

    # ---- generations

    def _published(self, peer: Peer, message: wire.Published) -> None:
        assert peer.hello is not None
        segment = self._holdings.numbered(peer.hello.seat, message.segment)
        if segment is not None and not peer.replaced and 0 <= message.slot < SLOTS:
            seq = message.seq or segment.arena.seq(message.slot)
            segment.published(message.slot, seq, message.unchanged)
            self._hashes.submit(segment, message.slot, seq)

    def _complete(self, peer: Peer, message: wire.Complete) -> None:
        assert peer.hello is not None
        self._holdings.completed(message.generation)
        self._rooms.grow(peer.hello.seat)

    def _persist(self, peer: Peer, message: wire.Persist) -> None:
        hello = peer.hello
        assert hello is not None
        self._hashes.when_done(lambda: self._persist_hashed(hello, message))

    def _persist_hashed(self, hello: wire.Hello, message: wire.Persist) -> None:
        found = self._holdings.find(message.generation, message.rank, message.world_size)
        if found is None:
            text = f"{message.generation} is not held here any more"
            self._loop.tell(hello.seat, wire.PersistFailed(generation=message.generation, reason=text, gone=True))
            return
        if message.rank == 0:
            self._rooms.look_at_disk(hello, found.proof.slot.image_bytes)
        self._shards.persist(found, hello, message)

    _answers: ClassVar[dict[type, Callable[..., None]]] = {
        wire.Hello: _hello,
        wire.Inventory: _inventory,
        wire.Allocate: _allocate,
        wire.Published: _published,
        wire.Complete: _complete,
        wire.Persist: _persist,
        wire.Open: _open,
        wire.Recall: _recall,
        wire.Replicate: _replicate,
        wire.Fetch: _fetch,
        wire.Drop: _drop,
        wire.Goodbye: _goodbye,
    }
