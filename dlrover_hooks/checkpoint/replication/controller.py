"""Replication in a keeper: what it sends to another node's keeper, holds for a third one, and fetches.

For each worker of another node there are two slots: the newest complete replica stays until the next one is complete.
Replicas never count as votes. `ReplicationController` belongs to the loop's thread; the listener's threads and the
fetching threads call it through `post`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.memory.keeper_segments import Found, ReplicaSlot, Segment, SegmentRegistry, age
from dlrover_hooks.checkpoint.memory.segment import SharedSegment, shared_folder
from dlrover_hooks.checkpoint.replication import replica_protocol as r
from dlrover_hooks.checkpoint.replication.listener import ReplicationListener
from dlrover_hooks.checkpoint.replication.peer_channel import Channel, call
from dlrover_hooks.checkpoint.replication.sender import Sender
from dlrover_hooks.checkpoint.replication.transfer import give, sound, take
from dlrover_hooks.checkpoint.storage import free_space
from dlrover_hooks.checkpoint.storage.filesystem import reason
from dlrover_hooks.errors import CheckpointError, Corrupt, KeeperAway
from dlrover_hooks.host.thread_pool import ThreadPool
from dlrover_hooks.protocol import KeeperAddress, Secret

SLOTS = 2
LOOP_S = 20.0
"""Timeout of a call on the loop, which normally runs at once."""
CALL_S = 10.0
"""Retry period for a keeper that is starting, or does not have the secret yet."""
BUSY_S = 60.0
"""Time that an image waits for another one of the same worker."""
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
Post = Callable[[Callable[[], None]], None]


class ReplicationController:
    """Inactive until a trainer sends `Replicate`."""

    def __init__(
        self, holdings: SegmentRegistry, post: Post, tell: Callable[[int, keeper_messages.KeeperMessage], None]
    ) -> None:
        self._holdings, self._post, self._tell = holdings, post, tell
        self._door: ReplicationListener | None = None
        self._node, self._secret = "", Secret()
        self._sender = Sender(self._failed)
        self._fetches = ThreadPool("fetch", 2, post)
        self._said: set[str] = set()

    # ---- what trainers ask

    def follow(self, order: keeper_messages.Replicate) -> int:
        """Take part as `order` directs; returns the port where others reach this keeper.

        Raises:
            KeeperAway: the address is not available.
        """
        self._node, self._secret = order.node, order.secret
        if self._door is None or (self._door.host, order.port or self._door.port) != (order.host, self._door.port):
            self._open_door(order)
        assert self._door is not None
        if order.secret.key:
            self._sender.aim(order.to, order.secret, order.node, order.mb_per_s * 1e6)
            for found in self._newest_own():
                self._sender.put(found)
        return self._door.port

    def _open_door(self, order: keeper_messages.Replicate) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
        try:
            self._door = ReplicationListener(
                order.host, order.port, lambda: self._secret, lambda: self._node, self._serve
            )
        except (OSError, OverflowError, UnicodeError) as error:  # the latter two: invalid port, invalid host name
            text = f"this node's keeper cannot listen on {order.host}:{order.port or '*'}: {reason(error)}"
            raise KeeperAway(text, hint="replicas=0 does without replication") from error

    def _newest_own(self) -> list[Found]:
        seats = self._holdings.seats.values()
        proved = ([Found(segment, proof) for segment in segments for proof in segment.valid()] for segments in seats)
        return [max(found, key=lambda one: age(one.proof.slot.generation)) for found in proved if found]

    def proved(self, found: Found) -> None:
        """An image of this node's own was hashed: the newest one of its worker."""
        if self._door is not None:
            self._sender.put(found)

    def fetch(self, order: keeper_messages.Fetch, then: Callable[[Exception | None], None]) -> None:
        """Copy the image named by `order` into this node's memory; `then(None or the error)` at the end."""
        self._fetches.submit(lambda: self._fetch(order), then)

    def close(self) -> None:
        """End all threads and connections."""
        self._sender.close()
        if self._door is not None:
            self._door.close()

    # ---- on other threads

    def _on_loop(self, call: Callable[[], _Answer]) -> _Answer:
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((call(), None))
            except CheckpointError as error:
                answer.put((None, error))

        self._post(run)
        try:
            value, error = answer.get(timeout=LOOP_S)
        except queue.Empty:
            raise KeeperAway("this keeper ends") from None
        if error is not None:
            raise error
        return value

    def _failed(self, found: Found, error: CheckpointError) -> None:
        """Warn once for each kind of reason: memory checkpoints continue without a replica."""

        def say() -> None:
            if isinstance(error, Corrupt):
                found.segment.refute(found.proof.slot)
            kind = type(error).__name__ + error.hint
            if kind not in self._said:
                self._said.add(kind)
                text = f"{found.proof.slot.generation} has no replica: {error}"
                self._tell(found.segment.seat, keeper_messages.Unreplicated(reason=text))

        _log.warning("not replicated: %s", error.message)
        self._post(say)

    def _serve(self, channel: Channel, node: str) -> None:
        """Handle a caller that offers an image or requests one."""
        word = channel.receive(r.Offer, r.Get)
        if isinstance(word, r.Get):
            found = self._on_loop(lambda: self._holdings.find(word.generation, word.rank, word.world_size))
            if found is None:
                channel.send(r.Refuse(f"{word.generation}, rank {word.rank}, is not held on node {self._node}"))
                return
            self._give(channel, found)
        elif word.home != node:
            channel.send(r.Refuse(f"node {node} sends what is of node {word.home}"))
        else:
            self._take(channel, word)

    def _has(self, offer: r.Offer) -> bool:
        return self._holdings.replicas.has(offer.home, offer.seat, offer.rank, offer.generation, offer.chunks)

    def _give(self, channel: Channel, found: Found) -> None:
        try:
            give(channel, found, self._node)
        except Corrupt:
            self._on_loop(lambda: found.segment.refute(found.proof.slot))
            raise

    def _fetch(self, order: keeper_messages.Fetch) -> None:
        errors: list[str] = []
        for at in order.at:
            if at.node != order.node:
                try:
                    self._fetch_from(at, order)
                    return
                except CheckpointError as error:
                    errors.append(error.message)
        which = f"{order.generation}, rank {order.rank}"
        raise Corrupt(f"no other node gave {which}: {'; '.join(errors) or 'none holds it'}")

    def _fetch_from(self, at: KeeperAddress, order: keeper_messages.Fetch) -> None:
        channel = call(at, order.secret, order.node, within_s=CALL_S)
        try:
            channel.send(r.Get(order.generation, order.rank, order.world_size))
            offer = channel.receive(r.Offer)
            wanted = order.generation, order.rank, order.world_size
            if (offer.generation, offer.rank, offer.world_size) != wanted:
                raise Corrupt(f"{channel.who} offers {offer} for {order.generation}, rank {order.rank}")
            self._take(channel, offer)
        finally:
            channel.close()

    def _take(self, channel: Channel, offer: r.Offer) -> None:
        """Receive the offered image into a slot. If it is not accepted, the sender gets the reason."""
        try:
            berth = self._berth(offer)
        except CheckpointError as error:
            channel.send(r.Refuse(error.message))
            raise
        if berth is None:
            channel.send(r.TransferComplete())
            return
        replicas, proof = self._holdings.replicas, None
        try:
            proof = take(channel, offer, berth)
        finally:
            self._on_loop(lambda: replicas.end(berth, proof))

    def _berth(self, offer: r.Offer) -> ReplicaSlot | None:
        """The slot to fill; None: the image is here already. Waits while another one of that worker arrives."""
        replicas, home, seat = self._holdings.replicas, offer.home, offer.seat
        if not sound(offer):
            raise KeeperAway(f"the numbers of what is offered, {offer}, do not agree")
        until = time.monotonic() + BUSY_S
        while not self._on_loop(lambda: self._has(offer)):
            if not self._on_loop(lambda: replicas.fits(home, seat, offer.image_bytes)):
                shared = _room(offer)
                self._on_loop(lambda shared=shared: replicas.add(Segment(seat, shared, home=home)))
            if (berth := self._on_loop(lambda: replicas.begin(home, seat))) is not None:
                return berth
            if time.monotonic() > until:
                raise KeeperAway(f"another image of node {home}, seat {seat}, is under way")
            time.sleep(0.05)
        return None


def _room(offer: r.Offer) -> SharedSegment:
    need, free = SLOTS * offer.image_bytes, free_space.free_memory(shared_folder())
    if need > free.nbytes:
        raise KeeperAway(
            f"{SLOTS} replicas of {free_space.size(offer.image_bytes)} do not fit into {free_space.size(free.nbytes)} "
            f"that are free on this node ({free.where} sets the limit)"
        )
    try:
        return SharedSegment.create(offer.seat, offer.image_bytes + offer.image_bytes // 64, SLOTS)
    except OSError as error:
        raise KeeperAway(f"no memory for replicas of node {offer.home}: {reason(error)}") from error
