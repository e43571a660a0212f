"""Notes that lie on another node (decision 0015), handed on by the new process group: who has a rank next need not be
where it was. Training thread, on all ranks at once; nothing is sent but where somebody lacks what somebody has.
"""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from dlrover_hooks.drawn import Statistics
from dlrover_hooks.standing import Noted

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Statistics).decode


def gathered(found: Noted, rank: int, world_size: int) -> Noted:
    """`found`, with what this rank lacks and others have found on their nodes.

    Raises:
        RuntimeError: a peer is gone, as from any collective.
    """
    if not found.alike or world_size == 1 or not _can_send(world_size):
        return found
    statistics = _encode(found.statistics) if found.statistics else b""
    here = [found.notes.get(number, b"") for number in range(world_size)] + [statistics]
    lacking = [0] * world_size + [not statistics]
    lacking[rank] = found.note is None
    senders = _greatest([(rank + 1) * bool(data) for data in here])
    wanted = _greatest(lacking)
    for number, (sender, want) in enumerate(zip(senders, wanted, strict=True)):
        if sender and want:
            here[number] = _sent(here[number], sender - 1)
    return found._replace(note=here[rank] or None, statistics=_decode(here[-1]) if here[-1] else ())


def _can_send(world_size: int) -> bool:
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        return False
    return any(known in dist.get_backend() for known in ("gloo", "nccl"))


def _device() -> torch.device:
    """Where the default group takes tensors from."""
    return torch.device("cpu" if "gloo" in dist.get_backend() else "cuda")


def _greatest(values: list[int]) -> list[int]:
    """By place, over all ranks."""
    tensor = torch.tensor(values, dtype=torch.int64, device=_device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _sent(data: bytes, sender: int) -> bytes:
    (size,) = _greatest([len(data) if dist.get_rank() == sender else 0])
    room = torch.zeros(size, dtype=torch.uint8)
    if dist.get_rank() == sender:
        room = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    room = room.to(_device())
    dist.broadcast(room, sender)
    return room.cpu().numpy().tobytes()
