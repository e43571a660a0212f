"""Connects the keeper's parts and controls its end: one loop, with worker threads (`ThreadPool`) for everything slow.

Hashing, pre-faulting and storing never delay a Hello, an Allocate or a hash of another worker. No torch.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from dlrover_hooks.checkpoint.ipc import keeper_messages, unix_socket
from dlrover_hooks.checkpoint.ipc.server_connection import Peer
from dlrover_hooks.checkpoint.ipc.server_loop import ServerLoop
from dlrover_hooks.checkpoint.keeper.emergency_flush import EmergencyFlush
from dlrover_hooks.checkpoint.keeper.hasher import SlotHasher
from dlrover_hooks.checkpoint.keeper.lifetime import Lifetime
from dlrover_hooks.checkpoint.keeper.persist_queue import PersistQueue
from dlrover_hooks.checkpoint.keeper.request_handlers import RequestHandlers
from dlrover_hooks.checkpoint.keeper.segment_allocator import SegmentAllocator
from dlrover_hooks.checkpoint.memory.keeper_segments import Found, Segment, SegmentRegistry
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot
from dlrover_hooks.checkpoint.replication.controller import ReplicationController
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.host.thread_pool import ThreadPool

LOOK_S = 2.0
"""Interval of the check that the socket file still exists. A trainer tries to connect for much longer."""
_log = logging.getLogger(__name__)


class Keeper:
    """Loop and state of the process. All but the jobs of the worker threads runs on the main thread."""

    def __init__(
        self, plate: unix_socket.KeeperSocket, *, life_fd: int | None, linger_s: float, grace_s: float
    ) -> None:
        self.holdings = SegmentRegistry()
        launched = life_fd is not None
        self._lifetime = Lifetime(time.monotonic(), launched=launched, linger_s=linger_s, grace_s=grace_s)
        self._plate, self._look_at = plate, time.monotonic() + LOOK_S
        self._loop = ServerLoop(plate.listener, self._handle, self._lost)
        rooms, openings = ThreadPool("room", 2, self._loop.post), ThreadPool("open", 2, self._loop.post)
        self._hashes = SlotHasher(self._loop.post, self._hashed)
        self._shards = PersistQueue(self._loop.post, self._loop.tell)
        self._will = EmergencyFlush(self.holdings, self._hashes, self._shards, lambda: self._answers.saving)
        self._replication = ReplicationController(self.holdings, self._loop.post, self._loop.tell)
        self._answers = RequestHandlers(
            self._loop,
            self.holdings,
            self._lifetime,
            self._hashes,
            self._shards,
            SegmentAllocator(self._loop, self.holdings, self._lifetime, self._shards, rooms),
            openings,
            self._will,
            self._replication,
        )
        self._will_begun = self._over = False
        if life_fd is not None:
            self._live_by(life_fd)

    def run(self) -> None:
        """Serve until the end."""
        while not self._over:
            self._loop.turn(self._timeout_s(time.monotonic()))
            self._advance(time.monotonic())
        self._replication.close()

    def stop(self) -> None:
        """End the keeper at the loop's next turn. Any thread, or a signal handler."""
        self._loop.post(self.end)

    def end(self) -> None:
        """Begin to end: accept no new connections; start the emergency flush once every published slot is hashed."""
        self._lifetime.end(time.monotonic())
        self._loop.close_door()

    def _timeout_s(self, now: float) -> float | None:
        timeout_s = self._lifetime.timeout_s(now)
        if self._lifetime.ending:
            return timeout_s
        look_s = max(self._look_at - now, 0.0)
        return look_s if timeout_s is None else min(timeout_s, look_s)

    def _look(self, now: float) -> None:
        """Recreate the socket if its folder was removed, as at the end of a login session: it must stay reachable."""
        self._look_at = now + LOOK_S
        try:
            if (listener := self._plate.mend()) is not None:
                _log.warning("the socket %s was removed; it is there again", self._plate.at.socket)
                self._loop.open_door(listener)
        except OSError as error:
            _log.warning("the socket %s was removed, and cannot be made again: %s", self._plate.at.socket, error)

    def _advance(self, now: float) -> None:
        if now >= self._look_at and not self._lifetime.ending:
            self._look(now)
        if self._lifetime.due(now):
            self.end()
        if self._lifetime.overdue(now):
            _log.error("the last generation was not made durable within %s s", self._lifetime.grace_s)
            self._over = True
        elif self._lifetime.ending and not self._will_begun and not self._hashes.pending and not self._shards.pending:
            self._write_will()

    def _live_by(self, fd: int) -> None:
        """End when the pipe `fd` is closed."""

        def ended() -> None:
            if not os.read(fd, 64):
                self._loop.unwatch(fd)
                for seat in list(self.holdings.seats):
                    self._hash_rest(seat)
                self.end()

        self._lifetime.launched = True
        self._loop.watch(fd, ended)

    # ---- what the parts say

    def _handle(self, peer: Peer, message: Any, fd: int) -> None:
        if isinstance(message, keeper_messages.Adopt):
            self._adopt(peer, message, fd)
        else:
            self._answers.take(peer, message)

    def _adopt(self, peer: Peer, message: keeper_messages.Adopt, fd: int) -> None:
        if fd < 0 and message.at is not None:
            fd = unix_socket.reach(message.at, os.O_RDONLY)
        if self._lifetime.ending or self._lifetime.launched or fd < 0:
            if fd >= 0:
                os.close(fd)
            self._loop.send(
                peer, keeper_messages.Refused(ref=message.ref, reason="this keeper ends, or has a launcher")
            )
            return
        self._live_by(fd)
        self._loop.send(peer, keeper_messages.Acknowledged(ref=message.ref))

    def _lost(self, peer: Peer) -> None:
        """The trainer's connection ended: free torn slots, and hash what it published and was never hashed.

        Slots hashed before are not hashed again here: they are verified when they are opened, written or sent.
        """
        if peer.hello is not None:
            seat = peer.hello.seat
            self.holdings.roll_back(seat, retired=peer.replaced)
            self._hash_rest(seat)
            if not peer.finished and not peer.replaced:
                self._will.trainer_died()
        if not any(other.asked for other in self._loop.peers):
            self._lifetime.alone(time.monotonic())

    def _hash_rest(self, seat: int) -> None:
        for segment, index in self.holdings.unproved(seat):
            self._hashes.submit(segment, index, segment.shared.seq(index))

    def _hashed(self, segment: Segment, index: int, proof: HashedSlot | Exception | None) -> None:
        if isinstance(proof, Exception):
            _log.error("local rank %d, slot %d could not be hashed: %s", segment.seat, index, proof)
        elif proof is not None and segment in self.holdings.seats[segment.seat]:
            self._tell_hashed(segment, proof)

    def _tell_hashed(self, segment: Segment, proof: HashedSlot) -> None:
        slot = proof.slot
        assert slot.generation is not None
        try:
            if segment.accept(proof):
                notice = keeper_messages.Hashed(generation=slot.generation, rank=slot.rank, world_size=slot.world_size)
                self._replication.proved(Found(segment, proof))
                self._loop.tell(segment.seat, notice)
        except Corrupt as damage:
            _log.error("%s", damage)
            self.holdings.damage.append(damage.message)
            self._loop.tell(segment.seat, keeper_messages.Damaged(generation=slot.generation, reason=damage.message))

    def _write_will(self) -> None:
        self._will_begun = True
        if self._lifetime.finished:
            self._end_now()
        else:
            self._will.write(self._end_now)

    def _end_now(self) -> None:
        self._over = True
