"""What the keeper does for its trainers, and when it ends: one loop, with threads (`crew`) for all that may take long.

Hashing, pre-faulting and storing never hold up Hello, Allocate or a hash of another seat (DL-90, DL-91). No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from dlrover_hooks.checkpoint import address, durable, seats, wire
from dlrover_hooks.checkpoint.arena import SLOTS, Arena, free_memory_bytes
from dlrover_hooks.checkpoint.crew import Crew
from dlrover_hooks.checkpoint.hashes import Hashes
from dlrover_hooks.checkpoint.holdings import Holdings, Proof, Segment
from dlrover_hooks.checkpoint.peer import Peer
from dlrover_hooks.checkpoint.place import reason
from dlrover_hooks.checkpoint.shards import Shards
from dlrover_hooks.errors import KeeperAway

FIRST_S = 30.0
_WITHOUT_SEAT = (wire.Hello, wire.Inventory, wire.Open, wire.Goodbye)
_log = logging.getLogger(__name__)


class Keeper:
    """State and loop of the process. Everything but the crews' jobs runs on the main thread."""

    def __init__(self, listener: socket.socket, *, life_fd: int | None, linger_s: float, grace_s: float) -> None:
        self.holdings = Holdings()
        self._listener: socket.socket | None = listener
        self._life_fd, self._linger_s, self._grace_s = life_fd, linger_s, grace_s
        self._peers: set[Peer] = set()
        self._inbox: deque[Callable[[], None]] = deque()
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._rooms = Crew("room", 2, self._post)
        self._hashes = Hashes(self._post, self._hashed)
        self._shards = Shards(self._post, self._tell)
        self._saving: wire.Hello | None = None
        """The newest Hello that names a `save_to`: where the last will goes."""
        self._unfinished: set[int] = set()
        self._seen_trainer = False
        self._alone_since: float | None = time.monotonic()
        self._deadline: float | None = None
        """Set once the keeper is ending."""
        self._will_begun = self._over = False
        self._selector = selectors.DefaultSelector()
        self._listen(listener, self._accept)
        self._listen(self._bell, self._answer_bell)
        if life_fd is not None:
            self._selector.register(life_fd, selectors.EVENT_READ, self._life_ended)

    def run(self) -> None:
        """Serve until the end."""
        while not self._over:
            for key, events in self._selector.select(self._timeout_s()):
                if isinstance(key.data, Peer):
                    self._serve(key.data, events)
                else:
                    key.data()
            self._advance()

    def stop(self) -> None:
        """End as soon as the loop gets to it. Any thread, or a signal handler."""
        self._post(self.end)

    def end(self) -> None:
        """Begin to end: nobody new comes in; the last will is written once all that was published is hashed."""
        if self._deadline is not None:
            return
        self._deadline = time.monotonic() + self._grace_s
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    # ---- the loop

    def _listen(self, source: socket.socket, then: Callable[[], None]) -> None:
        source.setblocking(False)
        self._selector.register(source, selectors.EVENT_READ, then)

    def _post(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop. Any thread, or a signal handler."""
        self._inbox.append(call)
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"!")

    def _answer_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._inbox:
            self._inbox.popleft()()

    def _timeout_s(self) -> float | None:
        until = self._deadline
        if until is None and self._life_fd is None and self._alone_since is not None:
            until = self._alone_since + self._patience_s
        return None if until is None else max(until - time.monotonic(), 0.0)

    def _advance(self) -> None:
        now = time.monotonic()
        if self._deadline is None:
            alone = self._life_fd is None and self._alone_since is not None
            if alone and (self._finished() or now >= (self._alone_since or 0.0) + self._patience_s):
                self.end()
        if self._deadline is not None:
            if now >= self._deadline:
                _log.error("the last generation was not made durable within %s s", self._grace_s)
                self._over = True
            elif not self._will_begun and not self._hashes.pending and not self._shards.pending:
                self._write_will()

    @property
    def _patience_s(self) -> float:
        """How long to wait for a trainer: whoever started this keeper gets time to say hello."""
        return self._linger_s if self._seen_trainer else max(self._linger_s, FIRST_S)

    def _finished(self) -> bool:
        return self._seen_trainer and not self._unfinished

    def _life_ended(self) -> None:
        assert self._life_fd is not None
        if not os.read(self._life_fd, 64):
            self._selector.unregister(self._life_fd)
            for seat in list(self.holdings.seats):
                self._hash_rest(seat)
            self.end()

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if not address.welcome(address.peer_uid(connection)):
            _log.warning("a process of user %d was refused", address.peer_uid(connection))
            connection.close()
            return
        peer = Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                alive = peer.frames.receive(peer.socket)
                for message, fd in peer.frames.messages():
                    self._handle(peer, message, fd)
                if not alive:
                    self._lose(peer)
                    return
            self._flush(peer)
        except BlockingIOError:
            return
        except (OSError, KeeperAway) as error:
            _log.info("a trainer's connection ended: %s", error)
            self._lose(peer)

    def _send(self, peer: Peer, message: wire.Wire, *fds: int) -> None:
        if peer in self._peers:
            peer.send(message, fds)
            try:
                self._flush(peer)
            except OSError:
                self._lose(peer)

    def _flush(self, peer: Peer) -> None:
        if peer in self._peers:
            wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.flush() else 0)
            self._selector.modify(peer.socket, wants, peer)

    def _lose(self, peer: Peer) -> None:
        """The trainer is gone: give torn slots back, hash what it had published."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.close()
        if peer.hello is not None:
            self.holdings.roll_back(peer.hello.seat, retired=peer.replaced)
            self._hash_rest(peer.hello.seat)
        if not any(other.asked for other in self._peers):
            self._alone_since = time.monotonic()

    def _hash_rest(self, seat: int) -> None:
        for segment, index in self.holdings.unproved(seat):
            self._hashes.submit(segment, index)

    # ---- what trainers ask

    def _handle(self, peer: Peer, message: Any, fd: int) -> None:
        if isinstance(message, wire.Adopt):
            self._adopt(peer, message, fd)
            return
        answer = self._answers.get(type(message))
        if answer is None or (peer.hello is None and not isinstance(message, _WITHOUT_SEAT)):
            raise KeeperAway(f"unexpected {type(message).__name__}")
        answer(self, peer, message)

    def _hello(self, peer: Peer, message: wire.Hello) -> None:
        self._sweep(peer)
        if (refused := seats.refused(peer, message, self._peers)) is not None:
            self._send(peer, refused)
            return
        for other in seats.holders(peer, message.seat, self._peers):
            other.replaced = True
            for segment in self.holdings.seats.get(message.seat, []):
                segment.retired = True
            self._send(other, wire.Replaced(pid=peer.pid))
        peer.hello = message
        peer.asked = self._seen_trainer = True
        self._alone_since = None
        self._unfinished.add(message.seat)
        if message.save_to is not None:
            self._saving = message
        self._welcome(peer, message)

    def _sweep(self, asking: Peer) -> None:
        """Take notice of trainers that died before `asking` spoke: a restarted one must find what they published."""
        for other in list(self._peers):
            if other is not asking:
                self._serve(other, selectors.EVENT_READ)

    def _inventory(self, peer: Peer, message: wire.Inventory) -> None:
        self._sweep(peer)
        if (refused := seats.refused(peer, message, self._peers)) is not None:
            self._send(peer, refused)
            return
        if message.master is not None:
            peer.asked = self._seen_trainer = True
            self._alone_since = None
        self._welcome(peer, message)

    def _welcome(self, peer: Peer, message: wire.Wire) -> None:
        """Answer once all that is published by now is hashed."""
        self._hashes.when_done(
            lambda: self._send(peer, wire.Welcome(ref=message.ref, held=self.holdings.held(), pid=os.getpid()))
        )

    def _allocate(self, peer: Peer, message: wire.Allocate) -> None:
        assert peer.hello is not None
        seat = peer.hello.seat
        segment = self.holdings.current(seat)
        if peer.replaced or self._deadline is not None:
            self._send(peer, wire.Refused(ref=message.ref, reason=f"seat {seat} was taken over, or the keeper ends"))
        elif segment is not None and segment.arena.slot_bytes >= message.slot_bytes:
            self._allocated(peer, message, segment)
        elif (free := free_memory_bytes()) < SLOTS * message.slot_bytes:
            self._send(
                peer,
                wire.Refused(
                    ref=message.ref,
                    reason=f"{SLOTS} slots of {message.slot_bytes} bytes do not fit into {free} bytes of free memory",
                    hint="in-memory checkpoints need three times the state's size per worker",
                ),
            )
        else:
            self._rooms.submit(
                lambda: Arena.create(seat, message.slot_bytes), lambda made: self._made(peer, message, seat, made)
            )

    def _made(self, peer: Peer, message: wire.Allocate, seat: int, made: Arena | Exception) -> None:
        if isinstance(made, Exception):
            self._send(peer, wire.Refused(ref=message.ref, reason=f"no memory for seat {seat}: {reason(made)}"))
        elif peer in self._peers and not peer.replaced:
            segment = Segment(seat, made)
            self.holdings.add(segment)
            self._allocated(peer, message, segment)

    def _allocated(self, peer: Peer, message: wire.Allocate, segment: Segment) -> None:
        busy = self._shards.under_way(segment.seat)
        reply = wire.Allocated(ref=message.ref, complete=self.holdings.complete, persisting=busy)
        self._send(peer, reply, segment.arena.fd)

    def _published(self, peer: Peer, message: wire.Published) -> None:
        assert peer.hello is not None
        segment = self.holdings.current(peer.hello.seat)
        if segment is not None and not peer.replaced and 0 <= message.slot < SLOTS:
            segment.supersede(message.slot)
            self._hashes.submit(segment, message.slot)

    def _hashed(self, segment: Segment, index: int, proof: Proof | Exception | None) -> None:
        if isinstance(proof, Exception):
            _log.error("seat %d, slot %d could not be hashed: %s", segment.seat, index, proof)
        elif proof is not None and segment in self.holdings.seats[segment.seat] and segment.accept(proof):
            slot = proof.slot
            assert slot.generation is not None
            notice = wire.Hashed(generation=slot.generation, rank=slot.rank, world_size=slot.world_size)
            self._tell(segment.seat, notice)

    def _tell(self, seat: int, notice: wire.Wire) -> None:
        for peer in list(self._peers):
            if peer.hello is not None and peer.hello.seat == seat and not peer.replaced:
                self._send(peer, notice)

    def _complete(self, peer: Peer, message: wire.Complete) -> None:
        self.holdings.completed(message.generation)

    def _persist(self, peer: Peer, message: wire.Persist) -> None:
        hello = peer.hello
        assert hello is not None
        self._hashes.when_done(lambda: self._persist_hashed(hello, message))

    def _persist_hashed(self, hello: wire.Hello, message: wire.Persist) -> None:
        seat, generation = hello.seat, message.generation
        found = self.holdings.find(generation, message.rank)
        if found is None:
            text = f"{generation} is not held here any more"
            self._tell(seat, wire.PersistFailed(generation=generation, reason=text, gone=True))
            return
        self._shards.persist(found, hello, message)

    def _open(self, peer: Peer, message: wire.Open) -> None:
        found = self.holdings.find(message.generation, message.rank)
        if found is None:
            text = f"{message.generation}, rank {message.rank}, is not held in this node's memory"
            self._send(peer, wire.Refused(ref=message.ref, reason=text))
            return
        self._rooms.submit(
            lambda: durable.verify(found), lambda proof: self._opened(peer, message, found.segment, proof)
        )

    def _opened(self, peer: Peer, message: wire.Open, segment: Segment, proof: Proof | Exception) -> None:
        if isinstance(proof, Exception):
            for index, old in list(segment.proofs.items()):
                if (old.slot.generation, old.slot.rank) == (message.generation, message.rank):
                    del segment.proofs[index]
            self._send(peer, wire.Refused(ref=message.ref, reason=str(proof)))
            return
        slot = proof.slot
        reply = wire.Opened(
            ref=message.ref, slot=slot.index, seq=slot.seq, image_bytes=slot.image_bytes, seat=segment.seat
        )
        self._send(peer, reply, segment.arena.fd)

    def _drop(self, peer: Peer, message: wire.Drop) -> None:
        if not peer.replaced:
            self.holdings.forget(message.run, sparing=seats.taken(peer, self._peers))
            self._shards.forget(message.run)
        self._send(peer, wire.Done(ref=message.ref))

    def _goodbye(self, peer: Peer, message: wire.Goodbye) -> None:
        if peer.hello is None:
            if message.finished:  # it has found the job finished
                self._unfinished = seats.taken(peer, self._peers)
        elif message.finished and not peer.replaced:
            self._unfinished.discard(peer.hello.seat)
        self._send(peer, wire.Done(ref=message.ref))

    def _adopt(self, peer: Peer, message: wire.Adopt, fd: int) -> None:
        if self._deadline is not None or self._life_fd is not None or fd < 0:
            if fd >= 0:
                os.close(fd)
            self._send(peer, wire.Refused(ref=message.ref, reason="this keeper ends, or has a launcher"))
            return
        self._life_fd = fd
        self._selector.register(fd, selectors.EVENT_READ, self._life_ended)
        self._send(peer, wire.Done(ref=message.ref))

    # ---- the end

    def _write_will(self) -> None:
        self._will_begun = True
        whole = self.holdings.newest_whole()
        saving = self._saving
        if whole is None or saving is None or saving.save_to is None or self._finished():
            self._over = True
            return
        generation, ranks = whole
        self._shards.last_will(ranks, generation, saving, self._will_written)

    def _will_written(self, manifest: Any) -> None:
        if isinstance(manifest, Exception):
            _log.error("the last generation was not made durable: %s", manifest)
        self._over = True

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
