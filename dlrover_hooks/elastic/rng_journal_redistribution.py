"""Redistributes RNG journal entries that lie on another node, over the new process group.

A rank may be assigned to another node than in the previous round, while its journal entries stay in the memory of the
old node. Transfers only entries that are missing on their new rank. If a node's memory is lost, the replica on another
node is used. Runs on the training thread, on all ranks at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist

from dlrover_hooks.rng.rank_journal import Statistics
from dlrover_hooks.worker.session_collaborators import Noted

LOST = (
    "rank %d: its random state was lost with its node, so it is seeded again: a model that draws will not end as in "
    "the undisturbed run"
)

log = logging.getLogger("dlrover_hooks")
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Statistics).decode


def gathered(found: Noted, rank: int, world_size: int) -> Noted:
    """`found`, completed with entries that this rank lacks and that other ranks have found on their nodes.

    Raises:
        RuntimeError: a peer is gone, as from any collective.
    """
    if not found.alike or world_size == 1 or sends_from(world_size) is None:
        return found
    here, told = _each(found.notes, found.statistics, world_size), _each(found.told, found.told_statistics, world_size)
    lacking = [0] * world_size + [not here[-1]]
    lacking[rank] = found.note is None
    scores = [1 + world_size if own else int(bool(other)) for own, other in zip(here, told, strict=True)]
    senders = greatest([score + rank if score else 0 for score in scores])
    wanted = greatest(lacking)
    for number, (sender, want) in enumerate(zip(senders, wanted, strict=True)):
        if sender and want:
            here[number] = _sent(here[number] or told[number], (sender - 1) % world_size)
    if any(senders[:-1]) and not here[rank]:
        log.warning(LOST, rank)
    return found._replace(note=here[rank] or None, statistics=_decode(here[-1]) if here[-1] else ())


def _each(notes: Mapping[int, bytes], statistics: Statistics, world_size: int) -> list[bytes]:
    """The entry of each rank, followed by the encoded statistics; empty bytes where there is none."""
    return [notes.get(number, b"") for number in range(world_size)] + [_encode(statistics) if statistics else b""]


def sends_from(world_size: int) -> torch.device | None:
    """Device for the default group's collectives; None if the group is missing or has another size or backend."""
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        return None
    known = dist.get_backend_config()  # `get_backend` lacks the backends of a default group
    return next((torch.device(one.split(":")[0]) for one in ("cpu:gloo", "cuda:nccl") if one in known), None)


def greatest(values: list[int]) -> list[int]:
    """Elementwise maximum over all ranks."""
    tensor = torch.tensor(values, dtype=torch.int64, device=sends_from(dist.get_world_size()))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _sent(data: bytes, sender: int) -> bytes:
    (size,) = greatest([len(data) if dist.get_rank() == sender else 0])
    room = torch.zeros(size, dtype=torch.uint8)
    if dist.get_rank() == sender:
        room = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    room = room.to(sends_from(dist.get_world_size()))
    dist.broadcast(room, sender)
    return room.cpu().numpy().tobytes()
