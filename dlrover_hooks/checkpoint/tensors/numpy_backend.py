"""NumPy arrays into a slot and out of it. `library` picks this module or `torch_backend`. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.checkpoint.memory.memcpy import Copier, Move, place_of
from dlrover_hooks.checkpoint.state.safetensors_layout import TensorSpec
from dlrover_hooks.checkpoint.tensors.generation_images import Stored, need_all
from dlrover_hooks.errors import UnsupportedState

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN: set[type] = set()
"""See `torch_backend.PLAIN`. Empty: each array is inspected."""


class Glance(NamedTuple):
    """Addresses of tensors and their forms, in words of 8 bytes."""

    addresses: bytes
    forms: bytes
    told: bool = False
    """`forms` are device, type, shape and strides of each tensor; otherwise only its size in bytes."""


def library() -> Any:
    """The backend of this process: `torch_backend` if torch is loaded, else this module."""
    if "torch" in sys.modules:
        from dlrover_hooks.checkpoint.tensors import torch_backend

        return torch_backend
    return sys.modules[__name__]


def spec(name: str, array: np.ndarray[Any, Any]) -> TensorSpec:
    """The layout request of an array."""
    return TensorSpec(name, NAMES[array.dtype], array.shape, array.nbytes)


def specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """See `torch_backend.specs`."""
    return tuple(spec(name, array) for name, array in tensors.items())


def spread(tensor: Any) -> None:
    """See `torch_backend.spread`."""


def rests(value: Any) -> bool:
    """See `torch_backend.rests`."""
    del value
    return False


def lie_plainly(values: Sequence[Any], single: Iterable[int]) -> bool:
    """See `torch_backend.lie_plainly`."""
    return not values


def any_negative(values: Sequence[Any], single: Iterable[int]) -> bool:
    """See `torch_backend.any_negative`."""
    del values, single
    return False


def glance(values: Sequence[Any], words: int) -> Glance:
    """See `torch_backend.glance`."""
    del values, words
    return Glance(b"", b"")


def plain(value: Any) -> Any:
    """`value` itself if it is contiguous, else a contiguous copy."""
    return np.ascontiguousarray(value)


def address(value: Any) -> int:
    """Address of an array's first byte."""
    return int(value.ctypes.data)


def on_device(value: Any) -> bool:
    """See `torch_backend.on_device`."""
    del value
    return False


def load(found: Iterable[Stored], copier: Copier | None = None) -> dict[str, Any]:
    """See `torch_backend.load`.

    Raises:
        UnsupportedState: a type that numpy does not have.
    """
    found = list(found)
    need_all(found)
    loaded = {stored.name: np.empty(stored.shape, _dtype(stored)) for stored in found}
    moves: list[Move] = []
    for stored in found:
        for piece in stored.pieces:
            where = tuple(slice(at, at + length) for at, length in zip(piece.offsets, piece.shape, strict=True))
            target = loaded[stored.name][(*where, ...)]  # without `...` a scalar, if it has no axes
            if target.flags.c_contiguous:
                moves.append((address(target), place_of(piece.image.view) + piece.start, target.nbytes))
            else:
                source = np.frombuffer(piece.image.view[piece.start : piece.stop], target.dtype)
                target[...] = source.reshape(piece.shape)
    (copier or Copier()).copy(moves)
    return loaded


def _dtype(stored: Stored) -> np.dtype[Any]:
    if stored.dtype not in DTYPES:
        raise UnsupportedState(
            f"{stored.name} is of {stored.dtype}, which numpy does not have", hint="import torch before it is loaded"
        )
    return DTYPES[stored.dtype]
