"""Torch tensors on their way into a slot: what they are, where they lie (`loading` is the way out).

Contiguous CPU tensors are copied without a torch operation (`copying`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from dlrover_hooks.checkpoint.header import Whole
from dlrover_hooks.checkpoint.image import TensorSpec
from dlrover_hooks.checkpoint.images import COMPLEX
from dlrover_hooks.errors import UnsupportedState

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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY_NAMES = {
    np.dtype(str(dtype).removeprefix("torch.")): name
    for name, dtype in DTYPES.items()
    if not name.startswith(("BF", "F8"))
}


def shards(tensors: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Shard]]:
    """`tensors` with the local part in the place of each DTensor, and where that part belongs.

    Raises:
        UnsupportedState: a DTensor of partial sums.
    """
    if PLAIN.issuperset(map(type, tensors.values())):
        return tensors, {}
    found = {name: _shard(name, tensor) for name, tensor in tensors.items() if hasattr(tensor, "device_mesh")}
    if not found:
        return tensors, {}
    return {name: one._local_tensor if name in found else one for name, one in tensors.items()}, found


class Shard(NamedTuple):
    """This rank's part of a DTensor begins at `offsets` of the whole of `shape`. `copy`: another rank writes it."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sharded: bool
    copy: bool


def _shard(name: str, tensor: Any) -> Shard:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(f"{name} is a DTensor of partial sums", hint="redistribute it to Shard or Replicate")
    return _placed(tensor.shape, tensor.device_mesh, tuple(tensor.placements))


@functools.lru_cache(maxsize=1 << 14)
def _placed(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> Shard:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    sharded = any(placement.is_shard() for placement in placements)
    where = mesh.get_coordinate() or (0,) * len(placements)
    copy = any(at > 0 and not placement.is_shard() for at, placement in zip(where, placements, strict=True))
    return Shard(tuple(shape), tuple(offsets), sharded, sharded and copy)


def specs(tensors: Mapping[str, Any], shards: Mapping[str, Shard] = MappingProxyType({})) -> tuple[TensorSpec, ...]:
    """What has to be laid out for `tensors` (torch tensors and numpy arrays), some of them parts: see `shards`.

    Raises:
        UnsupportedState: a tensor that is sparse, quantized, without storage, or of a type safetensors lacks.
    """
    return tuple(_spec(name, tensor, shards.get(name)) for name, tensor in tensors.items())


def _spec(name: str, tensor: Any, shard: Shard | None) -> TensorSpec:
    if isinstance(tensor, np.ndarray):
        return TensorSpec(name, _NUMPY_NAMES[tensor.dtype], tensor.shape, tensor.nbytes)
    dtype = COMPLEX if tensor.dtype is torch.complex128 else _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta tensor" if tensor.is_meta else f"{tensor.layout} tensor of {tensor.dtype}"
        raise UnsupportedState(f"{name} is a {kind}, which a safetensors image cannot hold", hint="convert it first")
    shape, whole = tuple(tensor.shape), None
    offsets = shard.offsets if shard is not None else (0,) * len(shape)
    if shard is not None:
        whole = Whole(shard.shape, dtype, shard.sharded, shard.copy)
    elif dtype == COMPLEX:
        whole = Whole(shape, dtype)
    if dtype == COMPLEX:
        return TensorSpec(name, "F64", (*shape, 2), tensor.nbytes, (*offsets, 0), whole)
    return TensorSpec(name, dtype, shape, tensor.nbytes, offsets, whole)


def plain(value: Any) -> Any:
    """`value` itself if its bytes lie as they read, else a contiguous copy."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    if value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return value if value.is_contiguous() else value.detach().contiguous()


def lie_plainly(values: Sequence[torch.Tensor]) -> bool:
    """All on the CPU, contiguous, and as they read: nothing is left to be negated. A few passes in C."""
    here = all(map(attrgetter("is_cpu"), values)) and all(map(torch.Tensor.is_contiguous, values))
    return here and not any(map(torch.Tensor.is_neg, values))


def addresses(values: Iterable[torch.Tensor]) -> list[int]:
    """Where the bytes of CPU tensors begin."""
    return list(map(torch.Tensor.data_ptr, values))


def address(value: Any) -> int:
    """Where the bytes of a `plain` array or tensor begin; 0 if they lie on a device."""
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    return value.data_ptr() if value.is_cpu else 0


def place_of(view: memoryview) -> int:
    """Where the bytes of `view` begin."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
