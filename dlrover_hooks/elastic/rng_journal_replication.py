"""Replicates the mid-step RNG journal entry to the next node before any rank can complete the step.

An entry in the memory of a node is lost with the node. So each rank sends its newest entry to a rank of the next node,
and receives the entries addressed to it, before it contributes its last gradients. If any rank has completed the step,
all entries have therefore been replicated.
"""

from __future__ import annotations

import logging
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrover_hooks.checkpoint.memory.segment import NOTE_BYTES
from dlrover_hooks.config import Place
from dlrover_hooks.elastic.rng_journal_redistribution import greatest, sends_from
from dlrover_hooks.rng.rank_journal import RngJournal

_LENGTH_BYTES = 4
_TAG = 0x7E11
"""Unlikely to be used by the training script."""
NO_GLOO = (
    "a node that is lost takes the random state of its ranks along: it is told to another one over gloo, which this "
    "process group has not (backend 'cpu:gloo,cuda:nccl' has it beside NCCL)"
)

log = logging.getLogger("dlrover_hooks")


class Peers(NamedTuple):
    """The rank that receives this rank's entry (`hears`), and the ranks whose entries this rank receives (`tell`)."""

    hears: int
    tell: tuple[int, ...]


class JournalReplication:
    """Replication over gloo for one round. Rank 0's entries are up to `statistics_bytes` larger than others.

    All methods raise RuntimeError if a peer is gone, as any collective does.

    Only the entries that come in are waited for. gloo (torch 2.13) may never end a send whose connection was shut down
    while it was written: it would wait for the timeout of the group, 30 minutes. A frame is used again two exchanges
    later. In between all ranks have reduced gradients, so the send is complete, or an error was raised.
    """

    def __init__(self, draws: RngJournal, place: Place, peers: Peers, statistics_bytes: int) -> None:
        self._draws, self._world_size, self._hears = draws, place.world_size, peers.hears
        self._frames = [bytearray(_frame_bytes(place.rank, statistics_bytes)) for _ in range(2)]
        self._sends: list[dist.Work | None] = [None, None]
        sizes = {one: _frame_bytes(one, statistics_bytes) for one in peers.tell}
        self._rooms = {one: torch.zeros(size, dtype=torch.uint8, device="cpu") for one, size in sizes.items()}

    def begin(self, note: bytes | None) -> None:
        """Replicate `note`, the entry that the round starts from. On all ranks at once, before the first step.

        Training thread.
        """
        self._draws.heard_begun(self._exchanged(note or b""))

    def tell(self, ranks: int) -> None:
        """Replicate the mid-step entry. Returns once the peers' entries are received.

        Returns at once unless all ranks take part. Runs on the thread that reduces gradients, on `ranks` ranks at once.
        """
        if ranks == self._world_size:
            self._draws.heard(self._exchanged(self._draws.within))

    def _exchanged(self, note: bytes) -> list[bytes]:
        self._frames.reverse()
        self._sends.reverse()
        frame, before = self._frames[0], self._sends[0]
        if before is not None:
            before.wait()
        note = note if len(note) + _LENGTH_BYTES <= len(frame) else b""
        frame[:_LENGTH_BYTES] = len(note).to_bytes(_LENGTH_BYTES, "little")
        frame[_LENGTH_BYTES : _LENGTH_BYTES + len(note)] = note
        self._sends[0] = dist.isend(torch.frombuffer(frame, dtype=torch.uint8), self._hears, tag=_TAG)
        for work in [dist.irecv(room, one, tag=_TAG) for one, room in self._rooms.items()]:
            assert work is not None
            work.wait()
        return [_opened(room.numpy().data) for room in self._rooms.values()]


def told(draws: RngJournal, place: Place, statistics_bytes: int) -> JournalReplication | None:
    """None if there is only one node, or no gloo backend for host memory. On all ranks at once, training thread.

    Raises:
        RuntimeError: a peer is gone, as from any collective.
    """
    if sends_from(place.world_size) != torch.device("cpu"):
        if place.rank == 0 and 0 < place.local_world_size < place.world_size:
            log.info(NO_GLOO)
        return None
    mine = [0] * place.world_size
    mine[place.rank] = 1 + zlib.crc32(place.node.encode())
    *nodes, most = greatest([*mine, statistics_bytes])
    peers = paired(nodes, place.rank)
    return JournalReplication(draws, place, peers, most) if peers is not None else None


def paired(nodes: list[int], rank: int) -> Peers | None:
    """Pair each rank with a rank of the next node; the next node's ranks share the load. None if there is one node.

    `nodes`: a number for each rank's node, by rank.
    """
    order = list(dict.fromkeys(nodes))
    ranks = {node: [one for one, where in enumerate(nodes) if where == node] for node in order}
    if len(order) == 1:
        return None

    def hears(one: int) -> int:
        following = ranks[order[(order.index(nodes[one]) + 1) % len(order)]]
        return following[ranks[nodes[one]].index(one) % len(following)]

    return Peers(hears(rank), tuple(one for one in range(len(nodes)) if hears(one) == rank))


def _frame_bytes(rank: int, statistics_bytes: int) -> int:
    return _LENGTH_BYTES + NOTE_BYTES + (statistics_bytes if rank == 0 else 0)


def _opened(frame: memoryview) -> bytes:
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    return bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
