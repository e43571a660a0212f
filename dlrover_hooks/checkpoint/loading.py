"""Torch tensors out of images, into memory of their own or into that of live ones.

What lies alike on both sides is copied by plain threads, without a torch operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from dlrover_hooks.checkpoint.copying import Copier, Move
from dlrover_hooks.checkpoint.images import COMPLEX, Piece, Stored, need_all
from dlrover_hooks.checkpoint.snapshot import DTYPES, place_of


def load(found: Iterable[Stored], copier: Copier | None = None) -> dict[str, torch.Tensor]:
    """The tensors `found`, whole, by name, in memory of their own: the images may change or go afterwards.

    Raises:
        Corrupt, StorageFailed: as `images.need`.
    """
    found = list(found)
    need_all(found)
    loaded = {stored.name: torch.empty(stored.shape, dtype=dtype_of(stored.dtype)) for stored in found}
    copy(
        (
            (_region(loaded[stored.name], piece), source(piece, stored.dtype))
            for stored in found
            for piece in stored.pieces
        ),
        copier,
    )
    return loaded


def dtype_of(name: str) -> torch.dtype:
    """Torch's type for a safetensors one, or for "C128"."""
    return torch.complex128 if name == COMPLEX else DTYPES[name]


def source(piece: Piece, dtype: str) -> torch.Tensor:
    """The piece where it lies: not to be written, nor used once its image is closed."""
    if piece.stop == piece.start:
        return torch.empty(piece.shape, dtype=dtype_of(dtype))
    address = place_of(piece.image.view) + piece.start
    memory = (ctypes.c_uint8 * (piece.stop - piece.start)).from_address(address)  # torch warns of read-only buffers
    return torch.frombuffer(memory, dtype=dtype_of(dtype)).view(piece.shape)


def _region(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    return whole[tuple(slice(at, at + length) for at, length in zip(piece.offsets, piece.shape, strict=True))]


@torch.no_grad()
def copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], copier: Copier | None = None) -> None:
    """Each (target, source), of one shape. Torch converts what does not lie alike."""
    moves: list[Move] = []
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, origin in pairs:
        alike = target.dtype is origin.dtype and target.is_cpu and not (target.is_conj() or target.is_neg())
        if alike and target.is_contiguous() and origin.is_contiguous():
            moves.append((target.data_ptr(), origin.data_ptr(), origin.nbytes))
        else:
            others.append((target, origin))
    (copier or Copier()).copy(moves)
    for target, origin in others:
        target.copy_(origin)
