"""Allocates the trainers' memory if there is space for it. Loop thread only; worker threads do the slow parts.

Messages about space are sent as notices to the trainer, because users read the trainer's log. No torch.
"""

from __future__ import annotations

import logging
from typing import Any

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.server_connection import Peer
from dlrover_hooks.checkpoint.ipc.server_loop import ServerLoop
from dlrover_hooks.checkpoint.keeper.lifetime import Lifetime
from dlrover_hooks.checkpoint.keeper.persist_queue import PersistQueue
from dlrover_hooks.checkpoint.memory.keeper_segments import Segment, SegmentRegistry
from dlrover_hooks.checkpoint.memory.segment import SLOTS, SharedSegment, shared_folder
from dlrover_hooks.checkpoint.save.segment_client import SPARE_BYTES
from dlrover_hooks.checkpoint.storage import free_space
from dlrover_hooks.checkpoint.storage.filesystem import reason
from dlrover_hooks.host.thread_pool import ThreadPool

_log = logging.getLogger(__name__)


class SegmentAllocator:
    """Segments by local rank (`seat`). `threads`: worker threads that create segments and measure disks."""

    def __init__(
        self, loop: ServerLoop, holdings: SegmentRegistry, lifetime: Lifetime, shards: PersistQueue, threads: ThreadPool
    ) -> None:
        self._loop, self._holdings, self._lifetime, self._shards = loop, holdings, lifetime, shards
        self._threads = threads
        self._making: set[int] = set()
        """Workers whose segment is being created: the free memory measured meanwhile is not final."""
        self._waiting: list[tuple[Peer, keeper_messages.Allocate]] = []
        self._disk_said = False

    def allocate(self, peer: Peer, message: keeper_messages.Allocate) -> None:
        """Reply with a segment whose slots are large enough; create one if necessary and possible."""
        assert peer.hello is not None
        seat = peer.hello.seat
        segment = self._holdings.current(seat)
        if peer.replaced or self._lifetime.ending:
            text = f"local rank {seat} is saved by another process, or the keeper ends"
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=text))
        elif segment is not None and segment.shared.serves(message.slot_bytes, message.note_bytes):
            self._allocated(peer, message, segment)
        else:
            self._make(peer, message, seat)

    def _make(self, peer: Peer, message: keeper_messages.Allocate, seat: int) -> None:
        try:
            verdict, slots = self._verdict(message.slot_bytes), SLOTS
            if not verdict.fits and self._making:
                self._waiting.append((peer, message))
                return
            if not verdict.fits and message.gives:
                verdict, slots = self._squeeze(seat, message.slot_bytes)
        except OSError as error:
            text = f"this system gives no shared memory: {reason(error)}"
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=text))
            return
        if not verdict.fits:
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=verdict.line, hint=verdict.hint))
            return
        for_images = message.slot_bytes > SPARE_BYTES
        if for_images:
            self._say(seat, verdict)
        self._making.add(seat)
        self._threads.submit(
            lambda: SharedSegment.create(seat, message.slot_bytes, note_bytes=message.note_bytes, filled=slots),
            lambda made: self._made(peer, message, seat, made),
        )
        if for_images:
            self.look_at_disk(peer.hello, message.slot_bytes)

    def _verdict(self, slot_bytes: int, slots: int = SLOTS) -> free_space.CapacityReport:
        """Whether slots of that size fit for all workers that have none yet. Raises OSError."""
        return free_space.memory(slot_bytes, self._without(slot_bytes), free_space.free_memory(shared_folder()), slots)

    def _squeeze(self, seat: int, slot_bytes: int) -> tuple[free_space.CapacityReport, int]:
        """The state has outgrown the slots: free the old ones one by one; if that is not enough, create fewer new ones.

        `grow` adds the others once the old segment is gone. There must be memory for two by then, or saves would stop.
        """
        for _ in self._holdings.give_up(seat, self._shards.under_way(seat)):
            if (verdict := self._verdict(slot_bytes)).fits:
                return verdict, SLOTS
        then = free_space.free_memory(shared_folder())
        then = then._replace(nbytes=then.nbytes + self._holdings.given_up_bytes(seat))
        if self._holdings.given_up_bytes(seat) and free_space.memory(slot_bytes, 1, then, 2).fits:
            for slots in (2, 1):
                if (verdict := self._verdict(slot_bytes, slots)).fits:
                    return verdict, slots
        return self._verdict(slot_bytes), 0

    def grow(self, seat: int) -> None:
        """Add a slot to the worker's segment if some did not fit when it was created and one fits now."""
        segment = self._holdings.current(seat)
        if segment is None or segment.shared.count == SLOTS or seat in self._making:
            return
        if free_space.memory(segment.shared.slot_bytes, 1, free_space.free_memory(shared_folder()), 1).fits:
            self._making.add(seat)
            self._threads.submit(segment.shared.grow, lambda grown: self._grown(seat, grown))

    def _grown(self, seat: int, grown: Exception | None) -> None:
        if grown is not None:
            _log.warning("local rank %d gets no further slot: %s", seat, reason(grown))
        self._made_one(seat)

    def _made_one(self, seat: int) -> None:
        """The segment of `seat` is made, or failed: retry the requests that waited."""
        self._making.discard(seat)
        waiting, self._waiting = self._waiting, []
        for other, request in waiting:
            if other in self._loop.peers:
                self.allocate(other, request)

    def _without(self, slot_bytes: int) -> int:
        """Number of this node's workers that have no slots of that size and are not getting them now."""
        seats = {peer.hello.seat for peer in self._loop.peers if peer.hello and not peer.replaced} - self._making
        segments = (self._holdings.current(seat) for seat in seats)
        return sum(1 for segment in segments if segment is None or segment.shared.slot_bytes < slot_bytes)

    def _made(self, peer: Peer, message: keeper_messages.Allocate, seat: int, made: SharedSegment | Exception) -> None:
        if isinstance(made, Exception):
            text = f"no memory for local rank {seat}: {reason(made)}"
            self._loop.send(peer, keeper_messages.Refused(ref=message.ref, reason=text))
        elif peer in self._loop.peers and not peer.replaced:
            segment = Segment(seat, made)
            self._holdings.add(segment)
            self._allocated(peer, message, segment)
        self._made_one(seat)

    def _allocated(self, peer: Peer, message: keeper_messages.Allocate, segment: Segment) -> None:
        self._shards.give_way(segment.seat)
        busy, shared = self._shards.under_way(segment.seat), segment.shared
        reply = keeper_messages.Allocated(
            ref=message.ref,
            complete=self._holdings.complete,
            persisting=busy,
            at=keeper_messages.whereabouts(shared.fd),
        )
        self._loop.send(peer, reply, shared.fd)

    # ---- the disk

    def look_at_disk(self, hello: keeper_messages.Hello | None, image_bytes: int) -> None:
        """Warn once if `keep` + 1 generations of `image_bytes` will not fit at a local `save_to`.

        Generations kept by other rules of `Retention` grow with time; later checks cover them.
        """
        if hello is None or hello.save_to is None or self._disk_said:
            return
        keep = hello.keep if isinstance(hello.keep, int) else hello.keep.last
        url, options, seat = hello.save_to, hello.storage_options, hello.seat
        self._threads.submit(
            lambda: free_space.at(url, options, image_bytes, keep),
            lambda verdict: self._looked(seat, verdict),
        )

    def _looked(self, seat: int, verdict: Any) -> None:
        if isinstance(verdict, Exception):
            _log.info("the space at `save_to` is not known: %s", verdict)
        elif verdict is not None and verdict.tight and not self._disk_said:
            self._disk_said = True
            self._say(seat, verdict)

    def _say(self, seat: int, verdict: free_space.CapacityReport) -> None:
        self._loop.tell(seat, keeper_messages.Space(line=verdict.line, tight=verdict.tight, hint=verdict.hint))
