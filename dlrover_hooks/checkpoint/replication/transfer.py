"""Transfers one image from keeper to keeper, chunk by chunk, each verified on arrival. Any thread; no torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, cut, digests
from dlrover_hooks.checkpoint.memory.keeper_segments import Found, ReplicaSlot
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot
from dlrover_hooks.checkpoint.replication import replica_protocol as r
from dlrover_hooks.checkpoint.replication.peer_channel import CHUNK_S, VERIFY_S, Channel
from dlrover_hooks.checkpoint.storage import shard_writer
from dlrover_hooks.errors import Corrupt, KeeperAway


class Overwritten(KeeperAway):
    """The trainer reused the slot before all of it was sent."""


def offer(found: Found, home: str) -> r.Offer:
    """The Offer of this image. `home`: this node; for a replica the home of its segment is used."""
    slot, chunks = found.proof
    assert slot.generation is not None
    where = found.segment.home or home, found.segment.seat
    return r.Offer(*where, slot.generation, slot.rank, slot.world_size, slot.image_bytes, chunks)


def give(channel: Channel, found: Found, home: str, wait: Callable[[int], object] = lambda _: None) -> None:
    """Offer the image and send the chunks that the other side requests; `wait(nbytes)` is called before each.

    Raises:
        Overwritten: the slot was reused meanwhile. The other side keeps what it had.
        Corrupt: the slot no longer holds what was hashed; names node, slot and chunk.
        KeeperAway: the other side refuses, hangs or is gone.
    """
    slot = found.proof.slot
    view = found.segment.shared.view(slot.index, slot.image_bytes)
    pieces = list(cut(view))
    channel.send(offer(found, home))
    while True:
        word = channel.receive(r.Want, r.TransferComplete, r.ChunkDamaged, within_s=VERIFY_S)
        if isinstance(word, r.TransferComplete):
            return
        if found.segment.shared.seq(slot.index) != slot.seq:
            channel.send(r.Refuse(f"{slot.generation} was overwritten by a newer one"))
            raise Overwritten(
                f"{slot.generation}, rank {slot.rank}, was overwritten before {channel.who} had it",
                hint="sending takes longer than two saves: save less often, or raise DLROVER_HOOKS_REPLICA_MB_PER_S",
            )
        if isinstance(word, r.ChunkDamaged) or word.chunk >= len(pieces):
            shard_writer.verify(found)
            raise KeeperAway(f"{channel.who} got chunk {word.chunk} of {slot.generation} damaged")
        wait(len(pieces[word.chunk]))
        channel.send(r.ChunkFollows())
        channel.send_bytes(pieces[word.chunk])


def take(channel: Channel, offer: r.Offer, berth: ReplicaSlot) -> HashedSlot:
    """Fill `berth` with the offered image, and publish it there.

    Raises:
        Corrupt: a chunk does not match its digest; names it, the image and the sender.
        KeeperAway: the sender cannot go on, hangs or is gone.
    """
    shared, index = berth.segment.shared, berth.slot
    view = shared.view(index, offer.image_bytes)
    pieces = list(cut(view))
    beside = berth.beside
    other = list(cut(shared.view(beside.slot.index, beside.slot.image_bytes))) if beside is not None else []
    sources = r.sources(offer.chunks, berth.inside, beside.chunks if beside is not None else ())
    for chunk, source in enumerate(sources):
        if source == "beside":
            pieces[chunk][:] = other[chunk]
        elif source == "sent":
            _fetch(channel, offer, chunk, pieces[chunk])
    damaged = [chunk for chunk, digest in enumerate(digests(view)) if digest != offer.chunks[chunk]]
    for chunk in damaged:  # damaged in this node's memory: fetch them again
        _fetch(channel, offer, chunk, pieces[chunk])
    if damaged and digests(view) != offer.chunks:
        raise Corrupt(f"the memory of this node does not keep {offer}")
    shared.publish(index, offer.generation, offer.rank, offer.world_size, offer.image_bytes)
    with contextlib.suppress(KeeperAway):  # the image is here, even if this fails
        channel.send(r.TransferComplete())
    return HashedSlot(shared.slot(index), offer.chunks)


def _fetch(channel: Channel, offer: r.Offer, chunk: int, piece: memoryview) -> None:
    channel.send(r.Want(chunk))
    channel.receive(r.ChunkFollows, within_s=CHUNK_S)
    channel.fill(piece)
    if digests(piece) != offer.chunks[chunk : chunk + 1]:
        channel.send(r.ChunkDamaged(chunk))
        raise Corrupt(f"{offer}: chunk {chunk} from {channel.who} did not match its hash")


def sound(offer: r.Offer) -> bool:
    """Whether the offer's numbers are consistent. Each one's own bounds were checked as it was decoded."""
    count = -(-offer.image_bytes // CHUNK_BYTES)
    return (
        0 < count == len(offer.chunks)
        and offer.rank < offer.world_size
        and re.fullmatch("[0-9a-f]{32}", offer.generation.run) is not None
    )
