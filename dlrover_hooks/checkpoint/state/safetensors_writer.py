"""The bytes of a slot and of a shard file: a safetensors image with DCP sharding info. Pure: no I/O, no torch.

    u64 header length | JSON {"__metadata__": {...}, tensors ...} padded with spaces to a multiple of 4096 | payload

Stock `safetensors` and stock `torch.distributed.checkpoint` (HuggingFaceStorageReader) read it. Tensors are sorted by
element size, descending, then name: the format forbids holes, and so each lies naturally aligned. The header has room
to spare, because the Python state in its metadata grows and shrinks from save to save.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec

from dlrover_hooks.checkpoint.state.safetensors_reader import (
    ITEM_BYTES,
    OURS,
    SHARDING,
    WHOLES,
    Header,
    Inside,
    WholeTensor,
)
from dlrover_hooks.checkpoint.state.safetensors_reader import parse as parse

PAGE = 4096
RESERVE = 16 << 10
PARTS = ("state", "rank", "data", "leases")
"""Parts of a saved tree: `state` and `data` are replicated; `rank` (random state) and `leases` are one rank's own."""


class Outgrown(Exception):
    """The metadata needs `needed` bytes more than the layout's header has: plan anew with a greater reserve."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"the header lacks {needed} bytes")
        self.needed = needed


class TensorSpec(NamedTuple):
    """One tensor: safetensors `dtype`, `shape`, bytes. `offsets`: place in the whole tensor, all 0 if replicated."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offsets: tuple[int, ...] = ()
    whole: WholeTensor | None = None
    """What it is as a whole, where the rest of this does not tell."""


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


class Subset(NamedTuple):
    """A smaller file out of an image: its header, then `pieces` (start, stop) of that image."""

    header: bytes
    pieces: tuple[tuple[int, int], ...]
    nbytes: int


def plan(specs: Iterable[TensorSpec], reserve: int = RESERVE, apart: Collection[str] = ()) -> Layout:
    """Lay `specs` out, with at least `reserve` bytes in the header for metadata; those `apart` next to each other.

    Shards of no bytes are only named: stock readers take an image for the whole tensor's as soon as it is in the table.
    """
    specs = tuple(specs)
    ordered = tuple(
        sorted(
            (spec for spec in specs if spec.nbytes or spec.whole is None),
            key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name in apart, spec.name),
        )
    )
    sharding = json.dumps(
        {spec.name: {"saved_offsets": list(spec.offsets or (0,) * len(spec.shape))} for spec in ordered},
        separators=(",", ":"),
    )
    ends: list[int] = []
    for spec in ordered:
        ends.append((ends[-1] if ends else 0) + spec.nbytes)
    begins = [0, *ends[:-1]]
    table = _table((spec.name, spec.dtype, spec.shape, a, b) for spec, a, b in zip(ordered, begins, ends, strict=False))
    wholes = {spec.name: spec.whole for spec in specs if spec.whole is not None}
    stock = {"format": "pt", "DCP_VERSION": "1.0", SHARDING: sharding}
    if wholes:
        stock[WHOLES] = msgspec.json.encode(wholes).decode()
    before = f'{{"__metadata__":{json.dumps(stock, separators=(",", ":"))[:-1]},"{OURS}":'.encode()
    after = f"}}{',' if table else ''}{table}}}".encode()
    header = _round_up(8 + len(before) + len(after) + reserve)
    starts = tuple(header + begin for begin, _ in zip(begins, ends, strict=False))
    return Layout(ordered, starts, header, header + (ends[-1] if ends else 0), before, after)


def header_parts(layout: Layout, inside: Inside) -> tuple[bytes, ...]:
    """The header, `layout.header_bytes` long in all: what safetensors, DCP and we look for.

    Raises:
        Outgrown: `inside` does not fit.
    """
    ours = msgspec.json.encode(msgspec.json.encode(inside).decode())
    return _padded((layout.before, ours, layout.after), layout.header_bytes)


def header_bytes(layout: Layout, inside: Inside) -> bytes:
    """`header_parts`, joined."""
    return b"".join(header_parts(layout, inside))


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
    if SHARDING in info:
        names = {name for _, name in kept}
        sharding = {name: row for name, row in json.loads(info[SHARDING]).items() if name in names}
        info[SHARDING] = json.dumps(sharding, separators=(",", ":"))
    table = _table(rows)
    text = f'{{"__metadata__":{json.dumps(info)}{"," if table else ""}{table}}}'.encode()
    size = _round_up(8 + len(text))
    pieces = tuple((header.tensors[name].start, header.tensors[name].stop) for _, name in kept)
    return Subset(b"".join(_padded((text,), size)), pieces, size + offset)


def _table(rows: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> str:
    table = {name: {"dtype": dtype, "shape": shape, "data_offsets": [a, b]} for name, dtype, shape, a, b in rows}
    return json.dumps(table, separators=(",", ":"))[1:-1]


def _padded(texts: tuple[bytes, ...], size: int) -> tuple[bytes, ...]:
    if (spare := size - 8 - sum(map(len, texts))) < 0:
        raise Outgrown(-spare)
    return struct.pack("<Q", size - 8), *texts, _spaces(spare)


@functools.lru_cache(maxsize=4)
def _spaces(count: int) -> bytes:
    """The same at nearly every save, and more than 100 KB."""
    return b" " * count


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
