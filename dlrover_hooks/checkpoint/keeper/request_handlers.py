"""Handles the requests of a keeper's trainers. Loop thread only; slow work goes to worker threads. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.server_connection import Peer
from dlrover_hooks.checkpoint.ipc.server_loop import ServerLoop
from dlrover_hooks.checkpoint.keeper import admission
from dlrover_hooks.checkpoint.keeper.emergency_flush import EmergencyFlush
from dlrover_hooks.checkpoint.keeper.hasher import SlotHasher
from dlrover_hooks.checkpoint.keeper.lifetime import Lifetime
from dlrover_hooks.checkpoint.keeper.persist_queue import PersistQueue
from dlrover_hooks.checkpoint.keeper.segment_allocator import SegmentAllocator
from dlrover_hooks.checkpoint.memory.keeper_segments import Segment, SegmentRegistry
from dlrover_hooks.checkpoint.memory.segment import SLOTS
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot
from dlrover_hooks.checkpoint.replication.controller import ReplicationController
from dlrover_hooks.checkpoint.storage import mounts, shard_writer
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.host.thread_pool import ThreadPool

_WITHOUT_SEAT = (
    keeper_messages.Hello,
    keeper_messages.Inventory,
    keeper_messages.OpenImage,
    keeper_messages.Recall,
    keeper_messages.Goodbye,
    keeper_messages.Replicate,
    keeper_messages.Fetch,
)
_log = logging.getLogger(__name__)


class RequestHandlers:
    """One method for each request. `saving`: the newest Hello that names a `save_to`."""

    def __init__(
        self,
        loop: ServerLoop,
        holdings: SegmentRegistry,
        lifetime: Lifetime,
        hashes: SlotHasher,
        shards: PersistQueue,
        rooms: SegmentAllocator,
        openings: ThreadPool,
        will: EmergencyFlush,
        replication: ReplicationController,
    ) -> None:
        self.saving: keeper_messages.Hello | None = None
        self._loop, self._holdings, self._lifetime = loop, holdings, lifetime
        self._hashes, self._shards, self._will = hashes, shards, will
        self._rooms, self._openings, self._replication = rooms, openings, replication

    def take(self, peer: Peer, message: Any) -> None:
        """Handle `message`. Raises KeeperAway if `peer` may not send it."""
        answer = self._answers.get(type(message))
        if answer is None or (peer.hello is None and not isinstance(message, _WITHOUT_SEAT)):
            raise KeeperAway(f"unexpected {type(message).__name__}")
        answer(self, peer, message)

    # ---- registration and end

    def _hello(self, peer: Peer, message: keeper_messages.Hello) -> None:
        self._loop.sweep(peer)
        if (refused := admission.refused(peer, message, self._loop.peers)) is not None:
            self._loop.send(peer, refused)
            return
        for other in admission.holders(peer, message.seat, self._loop.peers):
            other.replaced = True
            for segment in self._holdings.seats.get(message.seat, []):
                segment.retired = True
            self._loop.send(other, keeper_messages.Replaced(pid=peer.pid))
        peer.hello, peer.asked = message, True
        self._lifetime.came(message.seat)
        if message.save_to is not None:
            self.saving = message
        if message.replicate is not None:
            with contextlib.suppress(KeeperAway):  # Replicate reports it; saves continue without
                self._replication.follow(message.replicate)
        self._welcome(peer, message)

    def _inventory(self, peer: Peer, message: keeper_messages.Inventory) -> None:
        self._loop.sweep(peer)
        if (refused := admission.refused(peer, message, self._loop.peers)) is not None:
            self._loop.send(peer, refused)
            return
        if message.master is not None:
            peer.asked = True
            self._lifetime.came()
        self._welcome(peer, message, waits=message.waits)

    def _welcome(self, peer: Peer, message: keeper_messages.KeeperMessage, *, waits: bool = True) -> None:
        """Reply once everything published so far is hashed (`waits`), or at once."""

        def answer() -> None:
            held, damage = self._holdings.held(), tuple(self._holdings.damage)
            if peer.hello is not None and waits:
                self._holdings.damage.clear()
            left = self._hashes.pending_bytes
            reply = keeper_messages.Welcome(
                ref=message.ref, held=held, damage=damage, pid=os.getpid(), unhashed_bytes=left
            )
            self._loop.send(peer, reply)

        if waits:
            self._hashes.when_done(answer)
        else:
            answer()

    def _drop(self, peer: Peer, message: keeper_messages.Drop) -> None:
        if not peer.replaced:
            self._holdings.forget(message.run, sparing=admission.taken(peer, self._loop.peers))
            self._shards.forget(message.run)
            self._will.forget(message.run)
            mounts.forget()
        self._loop.send(peer, keeper_messages.Acknowledged(ref=message.ref))

    def _goodbye(self, peer: Peer, message: keeper_messages.Goodbye) -> None:
        peer.finished = message.finished
        if peer.hello is None:
            if message.finished:  # this process found that the job is finished
                self._lifetime.job_done(admission.taken(peer, self._loop.peers))
        elif message.finished and not peer.replaced:
            self._lifetime.done(peer.hello.seat)
        self._loop.send(peer, keeper_messages.Acknowledged(ref=message.ref))

    # ---- memory

    def _allocate(self, peer: Peer, message: keeper_messages.Allocate) -> None:
        self._rooms.allocate(peer, message)

    def _open(self, peer: Peer, message: keeper_messages.OpenImage) -> None:
        found = self._holdings.find(message.generation, message.rank, message.world_size)
        if found is None:
            text = f"{message.generation}, rank {message.rank}, is not held in this node's memory"
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=text))
            return
        self._openings.submit(
            lambda: shard_writer.verify(found), lambda proof: self._opened(peer, message, found.segment, proof)
        )

    def _opened(
        self, peer: Peer, message: keeper_messages.OpenImage, segment: Segment, proof: HashedSlot | Exception
    ) -> None:
        if isinstance(proof, Exception):
            if isinstance(proof, shard_writer.NotAsHashed):  # any other error says nothing about the image
                segment.refute(proof.found.proof.slot)
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=str(proof)))
            return
        slot = proof.slot
        reply = keeper_messages.Opened(
            ref=message.ref,
            slot=slot.index,
            seq=slot.seq,
            image_bytes=slot.image_bytes,
            seat=segment.seat,
            at=keeper_messages.whereabouts(segment.shared.fd),
        )
        self._loop.send(peer, reply, segment.shared.fd)

    def _recall(self, peer: Peer, message: keeper_messages.Recall) -> None:
        segments = (segment for segments in self._holdings.seats.values() for segment in reversed(segments))
        notes = tuple(note for segment in segments for note in segment.shared.notes())
        self._loop.send(peer, keeper_messages.Recalled(ref=message.ref, notes=notes))

    # ---- other nodes

    def _replicate(self, peer: Peer, message: keeper_messages.Replicate) -> None:
        try:
            port = self._replication.follow(message)
        except KeeperAway as error:
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=error.message, hint=error.hint))
        else:
            self._loop.send(peer, keeper_messages.Replicating(ref=message.ref, port=port))

    def _fetch(self, peer: Peer, message: keeper_messages.Fetch) -> None:
        def done(error: Exception | None) -> None:
            ref = message.ref
            self._loop.send(
                peer,
                keeper_messages.Refused(ref=ref, reason=str(error)) if error else keeper_messages.Acknowledged(ref=ref),
            )

        self._replication.fetch(message, done)

    # ---- generations

    def _published(self, peer: Peer, message: keeper_messages.Published) -> None:
        assert peer.hello is not None
        segment = self._holdings.numbered(peer.hello.seat, message.segment)
        if segment is not None and not peer.replaced and 0 <= message.slot < SLOTS:
            seq = message.seq or segment.shared.seq(message.slot)
            segment.published(message.slot, seq, message.unchanged)
            self._hashes.submit(segment, message.slot, seq)

    def _complete(self, peer: Peer, message: keeper_messages.Complete) -> None:
        assert peer.hello is not None
        self._holdings.completed(message.generation)
        self._rooms.grow(peer.hello.seat)

    def _persist(self, peer: Peer, message: keeper_messages.Persist) -> None:
        hello = peer.hello
        assert hello is not None
        self._hashes.when_done(lambda: self._persist_hashed(hello, message))

    def _persist_hashed(self, hello: keeper_messages.Hello, message: keeper_messages.Persist) -> None:
        found = self._holdings.find(message.generation, message.rank, message.world_size)
        if found is None:
            text = f"{message.generation} is not held here any more"
            self._loop.tell(
                hello.seat, keeper_messages.PersistFailed(generation=message.generation, reason=text, gone=True)
            )
            return
        if message.rank == 0:
            self._rooms.look_at_disk(hello, found.proof.slot.image_bytes)
        self._shards.persist(found, hello, message)

    _answers: ClassVar[dict[type, Callable[..., None]]] = {
        keeper_messages.Hello: _hello,
        keeper_messages.Inventory: _inventory,
        keeper_messages.Allocate: _allocate,
        keeper_messages.Published: _published,
        keeper_messages.Complete: _complete,
        keeper_messages.Persist: _persist,
        keeper_messages.OpenImage: _open,
        keeper_messages.Recall: _recall,
        keeper_messages.Replicate: _replicate,
        keeper_messages.Fetch: _fetch,
        keeper_messages.Drop: _drop,
        keeper_messages.Goodbye: _goodbye,
    }
