"""Torch tensors (and numpy arrays) into a slot and out of it. Imported by `numpy_backend.library` if torch is loaded.

Contiguous CPU tensors are copied without a torch operation (`memory.memcpy`). Loaded tensors are in new memory.
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
from dlrover_hooks.checkpoint.state.safetensors_header import WholeTensor
from dlrover_hooks.checkpoint.state.safetensors_layout import TensorSpec
from dlrover_hooks.checkpoint.tensors import numpy_backend
from dlrover_hooks.checkpoint.tensors.generation_images import COMPLEX, Stored, TensorPart, deliver, need_all
from dlrover_hooks.checkpoint.tensors.numpy_backend import Glance
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
"""Tensor types whose value is nothing but their bytes."""
_EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's C API for inspecting tensors, from torch 2.10 on."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The layout requests of `tensors` (torch tensors and numpy arrays).

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
    """Raises UnsupportedState unless all elements of `tensor` lie in its own memory, on the CPU or on CUDA."""
    dense = tensor.layout is torch.strided and not tensor.is_meta  # other layouts have their own error
    if tensor.is_nested or (dense and not _lies_whole(tensor)):
        kind = "nested tensor" if tensor.is_nested else f"{type(tensor).__name__} on {tensor.device} without its memory"
        raise UnsupportedState(f"{name} is a {kind}", hint="save a plain copy of it, or leave it out")


def _lies_whole(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return True
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # of wrapper subclasses that have no memory
        return False
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return address != 0 and (last + 1) * tensor.itemsize <= held and tensor.device.type in ("cpu", "cuda")


def _shard(name: str, tensor: Any) -> TensorSpec:
    """This rank's part of a DTensor. Only the first of several replicas is written to files."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(f"{name} is a DTensor of partial sums", hint="redistribute it to Shard or Replicate")
    plain = _spec(name, tensor._local_tensor)
    where = tensor.device_mesh.get_coordinate()  # in a later round this rank may differ
    offsets, sharded, copy = _place(tensor.shape, tensor.device_mesh, tensor.placements, where and tuple(where))
    dtype = plain.whole.dtype if plain.whole is not None else plain.dtype
    offsets += (0,) * (len(plain.shape) - len(offsets))
    return plain._replace(offsets=offsets, whole=WholeTensor(tuple(tensor.shape), dtype, sharded, copy))


@functools.lru_cache(maxsize=1 << 14)
def _place(
    shape: torch.Size, mesh: Any, placements: tuple[Any, ...], where: tuple[int, ...] | None
) -> tuple[tuple[int, ...], bool, bool]:
    """Begin of this rank's part; whether it is a part only; whether another rank has the same part and writes it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    sharded = any(placement.is_shard() for placement in placements)
    coordinate = where or (0,) * len(placements)
    copy = any(at > 0 and not placement.is_shard() for at, placement in zip(coordinate, placements, strict=True))
    return tuple(offsets), sharded, sharded and copy


def spread(tensor: Any) -> tuple[Any, Any] | None:
    """The distribution of a DTensor over the ranks; None for other tensors."""
    return (tensor.device_mesh, tensor.placements) if hasattr(tensor, "device_mesh") else None


def part(tensor: Any) -> Any:
    """The part of `tensor` in this process: the local shard of a DTensor, otherwise `tensor` itself."""
    return tensor._local_tensor if hasattr(tensor, "device_mesh") else tensor


def load(found: Iterable[Stored], copier: Copier | None = None) -> dict[str, torch.Tensor]:
    """The full tensors `found` by name, in memory of their own: images may change or be closed afterwards.

    Raises:
        Corrupt, StorageFailed: as `generation_images.need`.
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
    """Torch's type for a safetensors type, or for "C128"."""
    return torch.complex128 if name == COMPLEX else DTYPES[name]


def source(piece: TensorPart, dtype: str) -> torch.Tensor:
    """The piece in the image's memory. Read-only, and invalid once its image is closed."""
    if piece.stop == piece.start:
        return torch.empty(piece.shape, dtype=dtype_of(dtype))
    address = place_of(piece.image.view) + piece.start
    memory = (ctypes.c_uint8 * (piece.stop - piece.start)).from_address(address)  # torch warns of read-only buffers
    return torch.frombuffer(memory, dtype=dtype_of(dtype)).view(piece.shape)


def _region(whole: torch.Tensor, piece: TensorPart) -> torch.Tensor:
    return whole[tuple(slice(at, at + length) for at, length in zip(piece.offsets, piece.shape, strict=True))]


@torch.no_grad()
def copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], copier: Copier | None = None) -> None:
    """Copy each (target, source) of equal shape: by plain threads if the bytes are laid out alike, else by torch."""
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
    """`value` itself if it is contiguous and its bytes are its values, else a copy that is."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    value = part(value)
    if value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return value if value.is_contiguous() else value.detach().contiguous()


def rests(value: Any) -> bool:
    """Whether `value` is of the kind that `lie_plainly` tests."""
    if type(value) not in PLAIN or not value.is_cpu:
        return False
    return value.is_contiguous() and not (value.is_complex() or value.is_neg())


def lie_plainly(values: Sequence[torch.Tensor], single: Iterable[int]) -> bool:
    """Whether all are on the CPU, contiguous, and without a pending negation. A few passes in C.

    `single`: indices of the tensors with one element. Only these can be contiguous and still have the negative bit set.
    """
    here = all(map(attrgetter("is_cpu"), values)) and all(map(torch.Tensor.is_contiguous, values))
    return here and not any_negative(values, single)


def any_negative(values: Sequence[torch.Tensor], single: Iterable[int]) -> bool:
    """Whether one of these contiguous tensors has the negative bit set. `single`: see `lie_plainly`."""
    return any(values[index].is_neg() for index in single)


def glance(values: Sequence[torch.Tensor], words: int) -> Glance:
    """Addresses of CPU tensors of types in `PLAIN`, and their forms, which take `words` words.

    In one pass if the C helper is built and torch has the API. Otherwise, or if the length differs, only their sizes.
    """
    found = _look.look(_EXCHANGE, list(values), words) if _look is not None and _EXCHANGE is not None else None
    if found is not None:
        return Glance(found[0], found[1], told=True)
    return Glance(array("Q", addresses(values)).tobytes(), array("Q", map(attrgetter("nbytes"), values)).tobytes())


def addresses(values: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of the first bytes of CPU tensors."""
    return list(map(torch.Tensor.data_ptr, values))


def memory(values: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Storages that keep the bytes of tensors at their address, even if the tensors release them."""
    return list(map(torch.Tensor.untyped_storage, values))


def address(value: Any) -> int:
    """Address of the first byte of an array or tensor; 0 if its memory was released."""
    return int(value.ctypes.data) if isinstance(value, np.ndarray) else part(value).data_ptr()


def on_device(value: Any) -> bool:
    """Whether only a device can read the bytes of `value`."""
    return not isinstance(value, np.ndarray) and value.is_cuda
