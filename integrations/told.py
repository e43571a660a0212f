"""What a rank notes within a step is told to another node before anybody can make that step (decision 0015).

A note in the memory of a node is lost with it. So each rank sends its newest one to a rank of the next node, and has
received what it is sent, before it gives its last gradients away: whoever has made the step knows that all have.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrover_hooks.checkpoint.arena import NOTE_BYTES
from dlrover_hooks.config import Place
from dlrover_hooks.drawn import Draws
from dlrover_hooks.integrations.handed_on import greatest, sends_from

_LENGTH_BYTES = 4
_TAG = 0x7E11
"""Messages of the training script's own have others."""


class Peers(NamedTuple):
    """Whom this rank tells, and who tell it."""

    hears: int
    tell: tuple[int, ...]


class Told:
    """Of one life, over gloo. The first rank's notes have up to `statistics_bytes` more than others.

    `tell`: on the thread that reduces gradients, on all ranks at once.
    """

    def __init__(self, draws: Draws, rank: int, peers: Peers, statistics_bytes: int) -> None:
        self._draws, self._peers = draws, peers
        self._size = _frame(rank, statistics_bytes)
        sizes = {one: _frame(one, statistics_bytes) for one in peers.tell}
        self._rooms = {one: torch.zeros(size, dtype=torch.uint8, device="cpu") for one, size in sizes.items()}

    def tell(self) -> None:
        """Returns once what others tell has come.

        Raises:
            RuntimeError: a peer is gone, as from any collective.
        """
        note = self._draws.within
        note = note if len(note) + _LENGTH_BYTES <= self._size else b""
        frame = bytearray(len(note).to_bytes(_LENGTH_BYTES, "little") + note).ljust(self._size, b"\0")
        works = [dist.isend(torch.frombuffer(frame, dtype=torch.uint8), self._peers.hears, tag=_TAG)]
        works += [dist.irecv(room, one, tag=_TAG) for one, room in self._rooms.items()]
        for work in works:
            assert work is not None
            work.wait()
        self._draws.heard(_opened(room.numpy().tobytes()) for room in self._rooms.values())


def told(draws: Draws, place: Place, statistics_bytes: int) -> Told | None:
    """None where there is one node only, or no gloo for host memory. On all ranks at once, training thread.

    Raises:
        RuntimeError: a peer is gone, as from any collective.
    """
    if sends_from(place.world_size) != torch.device("cpu"):
        return None
    mine = [0] * place.world_size
    mine[place.rank] = 1 + zlib.crc32(place.node.encode())
    *nodes, most = greatest([*mine, statistics_bytes])
    peers = paired(nodes, place.rank)
    return Told(draws, place.rank, peers, most) if peers is not None else None


def paired(nodes: list[int], rank: int) -> Peers | None:
    """`nodes`: by rank. Each tells the next node, whose ranks share that out. None if there is one node."""
    order = list(dict.fromkeys(nodes))
    ranks = {node: [one for one, where in enumerate(nodes) if where == node] for node in order}
    if len(order) == 1:
        return None

    def hears(one: int) -> int:
        following = ranks[order[(order.index(nodes[one]) + 1) % len(order)]]
        return following[ranks[nodes[one]].index(one) % len(following)]

    return Peers(hears(rank), tuple(one for one in range(len(nodes)) if hears(one) == rank))


def _frame(rank: int, statistics_bytes: int) -> int:
    return _LENGTH_BYTES + NOTE_BYTES + (statistics_bytes if rank == 0 else 0)


def _opened(frame: bytes) -> bytes:
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    return frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
