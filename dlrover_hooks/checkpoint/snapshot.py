"""Torch tensors into a slot and out of it. The only module of this room that imports torch.

Contiguous CPU tensors are copied without a torch operation (`copying`). What is loaded lies in fresh memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dlrover_hooks.checkpoint.copying import Copier, Move
from dlrover_hooks.checkpoint.image import Header, TensorSpec
from dlrover_hooks.errors import Corrupt, UnsupportedState

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY_NAMES = {
    np.dtype(str(dtype).removeprefix("torch.")): name
    for name, dtype in DTYPES.items()
    if not name.startswith(("BF", "F8"))
}


def specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """What has to be laid out for `tensors` (torch tensors and numpy arrays).

    Raises:
        UnsupportedState: a tensor that is sparse, quantized, sharded, without storage, or of a type safetensors lacks.
    """
    return tuple(_spec(name, tensor) for name, tensor in tensors.items())


def _spec(name: str, tensor: Any) -> TensorSpec:
    if isinstance(tensor, np.ndarray):
        return TensorSpec(name, _NUMPY_NAMES[tensor.dtype], tensor.shape, tensor.nbytes)
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta tensor" if tensor.is_meta else f"{tensor.layout} tensor of {tensor.dtype}"
        raise UnsupportedState(f"{name} is a {kind}, which a safetensors image cannot hold", hint="convert it first")
    if hasattr(tensor, "device_mesh"):
        raise UnsupportedState(f"{name} is a DTensor", hint="sharded models are not supported yet: use DDP")
    return TensorSpec(name, dtype, tuple(tensor.shape), tensor.nbytes)


def load(
    buffer: memoryview, header: Header, names: Iterable[str], copier: Copier | None = None
) -> dict[str, torch.Tensor]:
    """The tensors `names` of the image in `buffer`, in memory of their own: `buffer` may change or go afterwards.

    Raises:
        Corrupt: the image lacks one of them.
    """
    base = place_of(buffer)
    loaded: dict[str, torch.Tensor] = {}
    moves: list[Move] = []
    for name in names:
        entry = header.tensors.get(name)
        if entry is None or entry.dtype not in DTYPES:
            raise Corrupt(f"the image does not hold tensor {name}")
        tensor = loaded[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        if entry.stop > entry.start:
            moves.append((tensor.data_ptr(), base + entry.start, entry.stop - entry.start))
    (copier or Copier()).copy(moves)
    return loaded


def plain(value: Any) -> Any:
    """`value` itself if its bytes lie as they read, else a contiguous copy."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    if value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return value if value.is_contiguous() else value.detach().contiguous()


def address(value: Any) -> int:
    """Where the bytes of a `plain` array or CPU tensor begin."""
    return int(value.ctypes.data) if isinstance(value, np.ndarray) else value.data_ptr()


def from_device(tensor: torch.Tensor, place: memoryview) -> None:
    """Copy a `plain` tensor of a device to `place`, and wait for it."""
    flat = torch.frombuffer(place, dtype=torch.uint8).view(tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())


def place_of(view: memoryview) -> int:
    """Where the bytes of `view` begin."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
