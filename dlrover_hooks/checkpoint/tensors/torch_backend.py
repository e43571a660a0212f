"""Torch tensors (and numpy arrays) into a slot and out of it. Imported only where torch is loaded (`arrays.library`).

Contiguous CPU tensors are copied without a torch operation (`copying`). What is loaded lies in fresh memory.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from dlrover_hooks.checkpoint.memory.memcpy import Copier, Move, place_of
from dlrover_hooks.checkpoint.state.safetensors_reader import WholeTensor
from dlrover_hooks.checkpoint.state.safetensors_writer import TensorSpec
from dlrover_hooks.checkpoint.tensors import numpy_backend
from dlrover_hooks.checkpoint.tensors.numpy_backend import Glance
from dlrover_hooks.checkpoint.tensors.shard_index import COMPLEX, Stored, TensorPart, deliver, need_all
from dlrover_hooks.errors import UnsupportedState

try:
    from dlrover_hooks.checkpoint.tensors import _look
except ImportError:  # installed without a compiler
    _look = None

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types of tensors that are nothing more than their bytes."""
_EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's way to look at tensors from C, from torch 2.10 on."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """What has to be laid out for `tensors` (torch tensors and numpy arrays).

    Raises:
        UnsupportedState: a tensor that is sparse, nested, quantized, of partial sums, without (all of) its memory, or
            of a type that safetensors lacks.
    """
    return tuple(_spec(name, tensor) for name, tensor in tensors.items())


def _spec(name: str, tensor: Any) -> TensorSpec:
    if isinstance(tensor, np.ndarray):
        return numpy_backend.spec(name, tensor)
    if hasattr(tensor, "device_mesh"):
        return _shard(name, tensor)
    _demand_bytes(name, tensor)
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        if tensor.dtype is torch.complex128 and tensor.layout is torch.strided and not tensor.is_meta:
            whole = WholeTensor(tuple(tensor.shape), COMPLEX)
            return TensorSpec(name, "F64", (*tensor.shape, 2), tensor.nbytes, whole=whole)
        kind = "meta tensor" if tensor.is_meta else f"{tensor.layout} tensor of {tensor.dtype}"
        raise UnsupportedState(f"{name} is a {kind}, which a safetensors image cannot hold", hint="convert it first")
    return TensorSpec(name, dtype, tuple(tensor.shape), tensor.nbytes)


def _demand_bytes(name: str, tensor: Any) -> None:
    """Raises UnsupportedState unless all elements of `tensor` lie in memory of its own, on the CPU or on CUDA."""
    dense = tensor.layout is torch.strided and not tensor.is_meta  # others have an error of their own
    if tensor.is_nested or (dense and not _lies_whole(tensor)):
        kind = "nested tensor" if tensor.is_nested else f"{type(tensor).__name__} on {tensor.device} without its memory"
        raise UnsupportedState(f"{name} is a {kind}", hint="save a plain copy of it, or leave it out")


def _lies_whole(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return True
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # of subclasses that only stand for other tensors
        return False
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return address != 0 and (last + 1) * tensor.itemsize <= held and tensor.device.type in ("cpu", "cuda")


def _shard(name: str, tensor: Any) -> TensorSpec:
    """This rank's part of a DTensor. Of replicas the first one is written to files."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(f"{name} is a DTensor of partial sums", hint="redistribute it to Shard or Replicate")
    plain = _spec(name, tensor._local_tensor)
    where = tensor.device_mesh.get_coordinate()  # the same mesh may be met at another rank in a later round
    offsets, sharded, copy = _place(tensor.shape, tensor.device_mesh, tensor.placements, where and tuple(where))
    dtype = plain.whole.dtype if plain.whole is not None else plain.dtype
    offsets += (0,) * (len(plain.shape) - len(offsets))
    return plain._replace(offsets=offsets, whole=WholeTensor(tuple(tensor.shape), dtype, sharded, copy))


@functools.lru_cache(maxsize=1 << 14)
def _place(
    shape: torch.Size, mesh: Any, placements: tuple[Any, ...], where: tuple[int, ...] | None
) -> tuple[tuple[int, ...], bool, bool]:
    """Where this rank's part begins; is it only a part; does another rank have the same one, too, and writes it?"""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    sharded = any(placement.is_shard() for placement in placements)
    coordinate = where or (0,) * len(placements)
    copy = any(at > 0 and not placement.is_shard() for at, placement in zip(coordinate, placements, strict=True))
    return tuple(offsets), sharded, sharded and copy


def spread(tensor: Any) -> tuple[Any, Any] | None:
    """How a DTensor lies over the ranks; None for others."""
    return (tensor.device_mesh, tensor.placements) if hasattr(tensor, "device_mesh") else None


def part(tensor: Any) -> Any:
    """What of `tensor` lies in this process: the local shard of a DTensor, else itself."""
    return tensor._local_tensor if hasattr(tensor, "device_mesh") else tensor


def load(found: Iterable[Stored], copier: Copier | None = None) -> dict[str, torch.Tensor]:
    """The tensors `found`, whole, by name, in memory of their own: the images may change or go afterwards.

    Raises:
        Corrupt, StorageFailed: as `images.need`.
    """
    found, copier = list(found), copier or Copier()
    loaded = {stored.name: torch.empty(stored.shape, dtype=dtype_of(stored.dtype)) for stored in found}
    entire = [stored for stored in found if len(stored.pieces) == 1 and stored.pieces[0].shape == stored.shape]
    deliver(((stored.pieces[0], loaded[stored.name].data_ptr()) for stored in entire), copier, loaded)
    rest = [stored for stored in found if len(stored.pieces) != 1 or stored.pieces[0].shape != stored.shape]
    need_all(rest)
    pairs = (
        (_region(loaded[stored.name], piece), source(piece, stored.dtype)) for stored in rest for piece in stored.pieces
    )
    copy(pairs, copier)
    return loaded


def dtype_of(name: str) -> torch.dtype:
    """Torch's type for a safetensors one, or for "C128"."""
    return torch.complex128 if name == COMPLEX else DTYPES[name]


def source(piece: TensorPart, dtype: str) -> torch.Tensor:
    """The piece where it lies: not to be written, nor used once its image is closed."""
    if piece.stop == piece.start:
        return torch.empty(piece.shape, dtype=dtype_of(dtype))
    address = place_of(piece.image.view) + piece.start
    memory = (ctypes.c_uint8 * (piece.stop - piece.start)).from_address(address)  # torch warns of read-only buffers
    return torch.frombuffer(memory, dtype=dtype_of(dtype)).view(piece.shape)


def _region(whole: torch.Tensor, piece: TensorPart) -> torch.Tensor:
    return whole[tuple(slice(at, at + length) for at, length in zip(piece.offsets, piece.shape, strict=True))]


@torch.no_grad()
def copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], copier: Copier | None = None) -> None:
    """Each (target, source), of one shape. By plain threads where the bytes lie alike; else torch converts."""
    moves: list[Move] = []
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, origin in pairs:
        alike = target.dtype is origin.dtype and target.device.type == "cpu"
        if alike and target.is_contiguous() and origin.is_contiguous() and not (target.is_conj() or target.is_neg()):
            moves.append((target.data_ptr(), origin.data_ptr(), origin.nbytes))
        else:
            others.append((target, origin))
    (copier or Copier()).copy(moves)
    for target, origin in others:
        target.copy_(origin)


def plain(value: Any) -> Any:
    """`value` itself if its bytes lie as they read, else a contiguous copy."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    value = part(value)
    if value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return value if value.is_contiguous() else value.detach().contiguous()


def rests(value: Any) -> bool:
    """May `value` be one of those that `lie_plainly` is asked of?"""
    if type(value) not in PLAIN or not value.is_cpu:
        return False
    return value.is_contiguous() and not (value.is_complex() or value.is_neg())


def lie_plainly(values: Sequence[torch.Tensor], single: Iterable[int]) -> bool:
    """All on the CPU, contiguous, and as they read: nothing is left to be negated. A few passes in C.

    `single`: which have one element. Only of those a view that is to be negated can be contiguous.
    """
    here = all(map(attrgetter("is_cpu"), values)) and all(map(torch.Tensor.is_contiguous, values))
    return here and not any_negative(values, single)


def any_negative(values: Sequence[torch.Tensor], single: Iterable[int]) -> bool:
    """Is one of them, which are contiguous, to be negated? `single`: see `lie_plainly`."""
    return any(values[index].is_neg() for index in single)


def glance(values: Sequence[torch.Tensor], words: int) -> Glance:
    """Where CPU tensors of types in `PLAIN` begin, and their forms, which take so many `words`.

    In one pass where the C helper is built and torch tells it. Else, or if they take more or less, only their bytes.
    """
    found = _look.look(_EXCHANGE, list(values), words) if _look is not None and _EXCHANGE is not None else None
    if found is not None:
        return Glance(found[0], found[1], told=True)
    return Glance(array("Q", addresses(values)).tobytes(), array("Q", map(attrgetter("nbytes"), values)).tobytes())


def addresses(values: Iterable[torch.Tensor]) -> list[int]:
    """Where the bytes of CPU tensors begin."""
    return list(map(torch.Tensor.data_ptr, values))


def memory(values: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """What keeps the bytes of tensors where they are, whatever becomes of those."""
    return list(map(torch.Tensor.untyped_storage, values))


def address(value: Any) -> int:
    """Where the bytes of an array or tensor begin; 0 if it has given them up."""
    return int(value.ctypes.data) if isinstance(value, np.ndarray) else part(value).data_ptr()


def on_device(value: Any) -> bool:
    """Do the bytes of `value` lie where only a device reads them?"""
    return not isinstance(value, np.ndarray) and value.is_cuda
