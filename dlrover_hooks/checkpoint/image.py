"""The bytes of a slot and of a shard file: a safetensors image with DCP sharding info. Pure: no I/O, no torch.

    u64 header length | JSON {"__metadata__": {...}, tensors ...} padded with spaces to a multiple of 4096 | payload

Stock `safetensors` and stock `torch.distributed.checkpoint` (HuggingFaceStorageReader) read it. Tensors are sorted by
element size, descending, then name: the format forbids holes, and so each lies naturally aligned. The header has room
to spare, because the Python state in its metadata grows and shrinks from save to save.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Message

PAGE = 4096
RESERVE = 16 << 10
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
PARTS = ("state", "rank", "data", "leases")
"""Parts of a saved tree: `state` and `data` are replicated; `rank` (random state) and `leases` are one rank's own."""
_OURS = "dlrover_hooks"


class Outgrown(Exception):
    """The metadata needs `needed` bytes more than the layout's header has: plan anew with a greater reserve."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"the header lacks {needed} bytes")
        self.needed = needed


class TensorSpec(NamedTuple):
    """One tensor: safetensors `dtype`, `shape`, bytes. `offsets`: place in the global tensor, all 0 if replicated."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offsets: tuple[int, ...] = ()


class Layout(NamedTuple):
    """Where things lie in an image. `starts[i]`: offset of `specs[i]` in the image. Same specs, same layout."""

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    header_bytes: int
    total_bytes: int
    before: bytes
    """The header's JSON up to what we say of an image, made once."""
    after: bytes
    """And from there on."""


class Inside(Message, frozen=True):
    """What the image says of itself, in its metadata. `skeletons`: tagged JSON by part (see `tree`)."""

    generation: Generation
    rank: int
    world_size: int
    skeletons: dict[str, msgspec.Raw]
    format: int = 1


class Entry(NamedTuple):
    """One tensor of a parsed header; `start`, `stop`: bytes in the image."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """A parsed header. `payload`: where the tensors begin."""

    metadata: dict[str, str]
    tensors: dict[str, Entry]
    payload: int
    total_bytes: int

    def inside(self) -> Inside:
        """What dlrover_hooks wrote into the metadata. Raises Corrupt if it is not there or not readable."""
        try:
            return msgspec.json.decode(self.metadata[_OURS], type=Inside)
        except (KeyError, msgspec.DecodeError) as error:
            raise Corrupt(f"the image has no readable {_OURS!r} metadata: {error}") from error


class Subset(NamedTuple):
    """A smaller file out of an image: its header, then `pieces` (start, stop) of that image."""

    header: bytes
    pieces: tuple[tuple[int, int], ...]
    nbytes: int


def plan(specs: Iterable[TensorSpec], reserve: int = RESERVE) -> Layout:
    """Lay `specs` out, with at least `reserve` bytes in the header for metadata."""
    ordered = tuple(sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name)))
    sharding = json.dumps(
        {spec.name: {"saved_offsets": list(spec.offsets or (0,) * len(spec.shape))} for spec in ordered},
        separators=(",", ":"),
    )
    ends: list[int] = []
    for spec in ordered:
        ends.append((ends[-1] if ends else 0) + spec.nbytes)
    begins = [0, *ends[:-1]]
    table = _table((spec.name, spec.dtype, spec.shape, a, b) for spec, a, b in zip(ordered, begins, ends, strict=False))
    before = (
        f'{{"__metadata__":{{"format":"pt","DCP_VERSION":"1.0","DCP_SHARDING_INFO":{json.dumps(sharding)},"{_OURS}":'
    )
    after = f"}}{',' if table else ''}{table}}}"
    header = _round_up(8 + len(before) + len(after) + reserve)
    starts = tuple(header + begin for begin, _ in zip(begins, ends, strict=False))
    return Layout(ordered, starts, header, header + (ends[-1] if ends else 0), before.encode(), after.encode())


def header_bytes(layout: Layout, inside: Inside) -> bytes:
    """The header, exactly `layout.header_bytes` long: what safetensors, DCP and we look for.

    Raises:
        Outgrown: `inside` does not fit.
    """
    ours = msgspec.json.encode(msgspec.json.encode(inside).decode())
    return _padded(b"".join((layout.before, ours, layout.after)), layout.header_bytes)


def parse(view: memoryview | bytes | bytearray) -> Header:
    """Read the header of the image that begins `view`.

    Raises:
        Corrupt: this is no image, or its table does not fit `view`.
    """
    view = memoryview(view)
    try:
        (length,) = struct.unpack_from("<Q", view)
        if 8 + length > len(view):
            raise ValueError(f"header of {length} bytes in an image of {len(view)}")
        table: dict[str, Any] = json.loads(bytes(view[8 : 8 + length]))
        info = table.pop("__metadata__", {})
        tensors = {name: _entry(row, 8 + length) for name, row in table.items()}
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Corrupt(f"not a safetensors image: {error}") from error
    total = max((entry.stop for entry in tensors.values()), default=8 + length)
    for name, entry in tensors.items():
        if entry.stop > len(view) or _size(entry) != entry.stop - entry.start:
            raise Corrupt(f"tensor {name} does not fit its image")
    return Header(info, tensors, 8 + length, total)


def subset(header: Header, wanted: Callable[[str], bool]) -> Subset:
    """The file that holds only the tensors whose name is `wanted`, in the order of the image."""
    kept = sorted((entry.start, name) for name, entry in header.tensors.items() if wanted(name))
    rows: list[tuple[str, str, tuple[int, ...], int, int]] = []
    offset = 0
    for _, name in kept:
        entry = header.tensors[name]
        rows.append((name, entry.dtype, entry.shape, offset, offset + entry.stop - entry.start))
        offset = rows[-1][-1]
    info = dict(header.metadata)
    if "DCP_SHARDING_INFO" in info:
        names = {name for _, name in kept}
        sharding = {name: row for name, row in json.loads(info["DCP_SHARDING_INFO"]).items() if name in names}
        info["DCP_SHARDING_INFO"] = json.dumps(sharding, separators=(",", ":"))
    table = _table(rows)
    text = f'{{"__metadata__":{json.dumps(info)}{"," if table else ""}{table}}}'.encode()
    size = _round_up(8 + len(text))
    pieces = tuple((header.tensors[name].start, header.tensors[name].stop) for _, name in kept)
    return Subset(_padded(text, size), pieces, size + offset)


def _table(rows: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> str:
    table = {name: {"dtype": dtype, "shape": shape, "data_offsets": [a, b]} for name, dtype, shape, a, b in rows}
    return json.dumps(table, separators=(",", ":"))[1:-1]


def _padded(text: bytes, size: int) -> bytes:
    if (spare := size - 8 - len(text)) < 0:
        raise Outgrown(-spare)
    return struct.pack("<Q", size - 8) + text.ljust(len(text) + spare)


def _entry(row: Mapping[str, Any], payload: int) -> Entry:
    start, stop = row["data_offsets"]
    if not 0 <= start <= stop:
        raise ValueError(f"data_offsets {start}, {stop}")
    return Entry(row["dtype"], tuple(row["shape"]), payload + start, payload + stop)


def _size(entry: Entry) -> int:
    size = ITEM_BYTES.get(entry.dtype, 0)
    for length in entry.shape:
        size *= length
    return size


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
