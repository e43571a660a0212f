"""Reads the header of an untrusted safetensors image. Bad ones raise Corrupt before they can do harm.

No memory is allocated for sizes that a header claims before they are compared with the bytes present. The tensors must
fill the payload without gaps or overlaps, as the format demands. Pure: no I/O, no torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Message

HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the `safetensors` library itself."""
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4}
ITEM_BYTES |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
OURS = "dlrover_hooks"
WHOLES = "dlrover_hooks_wholes"
SHARDING = "DCP_SHARDING_INFO"
_BROKEN = (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class WholeTensor(Message, frozen=True):
    """Full shape and dtype of a tensor if the image holds only a part or another representation of it.

    A shard (`sharded`) is written to files once: not by ranks whose shard is a `copy` of another rank's. complex128,
    which safetensors lacks, is stored as F64 with a trailing dimension of 2; its `dtype` here is "C128".
    """

    shape: tuple[int, ...]
    dtype: str
    sharded: bool = False
    copy: bool = False


class Inside(Message, frozen=True):
    """dlrover_hooks' own metadata of an image. `skeletons`: tagged JSON by part (see `pytree`)."""

    generation: Generation
    rank: int
    world_size: int
    skeletons: dict[str, msgspec.Raw]
    format: int = 1


class TensorEntry(NamedTuple):
    """One tensor of a parsed header; `start`, `stop`: bytes in the image."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """A parsed header. `payload`: where the tensors begin."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    payload: int
    total_bytes: int

    def inside(self) -> Inside:
        """The metadata that dlrover_hooks wrote. Raises Corrupt if it is missing or unreadable."""
        return _decoded(self.metadata, OURS, Inside)

    def wholes(self) -> dict[str, WholeTensor]:
        """By name, full tensors of which the table has only a part or, for empty shards, nothing. Raises Corrupt."""
        return _decoded(self.metadata, WHOLES, dict[str, WholeTensor]) if WHOLES in self.metadata else {}

    def offsets(self) -> dict[str, tuple[int, ...]]:
        """By name, the offsets of this image's tensors in the full tensors. Raises Corrupt."""
        if SHARDING not in self.metadata:
            return {name: (0,) * len(entry.shape) for name, entry in self.tensors.items()}
        rows = _decoded(self.metadata, SHARDING, dict[str, _Offsets])
        if rows.keys() != self.tensors.keys():
            raise Corrupt(f"{SHARDING} and the table of the image name different tensors")
        return {name: row.saved_offsets for name, row in rows.items()}


class _Offsets(msgspec.Struct):
    saved_offsets: tuple[int, ...]


def _decoded(metadata: Mapping[str, str], key: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(metadata[key], type=kind)
    except (KeyError, ValueError, RecursionError) as error:
        raise Corrupt(f"the image has no readable {key!r} metadata: {error}") from error


def header_end(view: memoryview | bytes | bytearray, nbytes: int) -> int:
    """End of the header of an image of `nbytes` that begins with `view` (8 bytes are enough).

    Raises:
        Corrupt: the image is too short for a header, or for the one it claims.
    """
    if len(view) < 8:
        raise Corrupt(f"not a safetensors image: {len(view)} bytes")
    (length,) = struct.unpack_from("<Q", view)
    if length > HEADER_LIMIT or 8 + length > nbytes:
        raise Corrupt(f"not a safetensors image: header of {length} bytes in an image of {nbytes}")
    return 8 + length


def holds_shards(view: memoryview) -> bool:
    """Whether the image `view` holds parts of tensors. A text search, because a keeper needs it for each save.

    A state with this text in a string gives True, too. The only effect is that more images are requested.
    """
    try:
        return rb"\"sharded\":true" in bytes(view[8 : header_end(view[:8], len(view))])
    except Corrupt:
        return False


def parse(view: memoryview | bytes | bytearray, nbytes: int | None = None) -> Header:
    """Parse the header at the start of `view`, of an image of `nbytes` (None: `view` is the complete image).

    Raises:
        Corrupt: it is not an image, or its table does not describe these bytes.
    """
    nbytes = len(view) if nbytes is None else nbytes
    end = header_end(view, nbytes)
    try:
        table = json.loads(bytes(memoryview(view)[8:end]).decode(), object_pairs_hook=_unique)
        info = msgspec.convert(table.pop("__metadata__", {}), dict[str, str])
        tensors = {name: _entry(name, row, end, nbytes) for name, row in table.items()}
    except _BROKEN as error:
        raise Corrupt(f"not a safetensors image: {error}") from error
    _refuse_gaps(tensors, end, nbytes)
    return Header(info, tensors, end, nbytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object of the header")
    return found


class _Row(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _entry(name: str, row: Any, payload: int, nbytes: int) -> TensorEntry:
    found = msgspec.convert(row, _Row)
    start, stop = (payload + offset for offset in found.data_offsets)
    if not payload <= start <= stop <= nbytes or size(found.dtype, found.shape, limit=nbytes) != stop - start:
        raise ValueError(
            f"tensor {name} does not fit its image: {found.dtype} {list(found.shape)[:8]} in {stop - start} bytes"
        )
    return TensorEntry(found.dtype, found.shape, start, stop)


def size(dtype: str, shape: Iterable[int], *, limit: int) -> int | None:
    """Bytes of a tensor; None if dtype or shape is invalid, or if it is larger than `limit`."""
    shape, total = tuple(shape), ITEM_BYTES.get(dtype, 0)
    if not total or any(length < 0 for length in shape):
        return None
    if 0 in shape:
        return 0
    for length in shape:
        total *= length
        if total > limit:
            return None
    return total


def _refuse_gaps(tensors: Mapping[str, TensorEntry], payload: int, nbytes: int) -> None:
    at = payload
    for start, stop, name in sorted((entry.start, entry.stop, name) for name, entry in tensors.items()):
        if start != at:
            raise Corrupt(f"not a safetensors image: tensor {name} begins at byte {start}, not at {at}")
        at = stop
    if at != nbytes:
        raise Corrupt(f"not a safetensors image: its tensors end at byte {at} of {nbytes}")
