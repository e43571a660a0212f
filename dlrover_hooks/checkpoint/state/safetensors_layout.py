"""The bytes of a slot and of a shard file: a safetensors image with DCP sharding info. Pure: no I/O, no torch.

    u64 header length | JSON {"__metadata__": {...}, tensors ...} padded with spaces to a multiple of 4096 | payload

Stock `safetensors` and stock `torch.distributed.checkpoint` (HuggingFaceStorageReader) can read it. Tensors are sorted
by element size, descending, then by name: the format forbids gaps, and in this order each is naturally aligned. The
header has spare bytes, because the Python state in its metadata changes its size from save to save.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec

from dlrover_hooks.checkpoint.state.safetensors_header import (
    ITEM_BYTES,
    OURS,
    SHARDING,
    WHOLES,
    Header,
    Inside,
    WholeTensor,
    parse as parse,
)

PAGE = 4096
RESERVE = 16 << 10
PARTS = ("state", "rank", "data", "leases")
"""Parts of a saved tree: `state` and `data` are replicated; `rank` (random state) and `leases` belong to one rank."""


class Outgrown(Exception):
    """The metadata needs `needed` bytes more than the header has: plan again with a larger reserve."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"the header lacks {needed} bytes")
        self.needed = needed


class TensorSpec(NamedTuple):
    """One tensor: safetensors `dtype`, `shape`, bytes. `offsets`: position in the full tensor, all 0 if replicated."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offsets: tuple[int, ...] = ()
    whole: WholeTensor | None = None
    """The full tensor, if it differs from this one."""


class Layout(NamedTuple):
    """Positions in an image. `starts[i]`: offset of `specs[i]` in the image. Equal specs give equal layouts."""

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    header_bytes: int
    total_bytes: int
    before: bytes
    """The header's JSON before dlrover_hooks' own metadata, encoded once."""
    after: bytes
    """The header's JSON after it."""


class Subset(NamedTuple):
    """A smaller file from an image: its header, then `pieces` (start, stop) of that image."""

    header: bytes
    pieces: tuple[tuple[int, int], ...]
    nbytes: int


def plan(specs: Iterable[TensorSpec], reserve: int = RESERVE, apart: Collection[str] = ()) -> Layout:
    """Lay out `specs`, with at least `reserve` header bytes for metadata; those named in `apart` are kept together.

    Shards of no bytes are not in the table, or stock readers would take the image for that of the full tensor.
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
    """The header, `layout.header_bytes` long in total: for safetensors, DCP and dlrover_hooks.

    Raises:
        Outgrown: `inside` does not fit.
    """
    ours = msgspec.json.encode(msgspec.json.encode(inside).decode())
    return _padded((layout.before, ours, layout.after), layout.header_bytes)


def header_bytes(layout: Layout, inside: Inside) -> bytes:
    """`header_parts`, joined."""
    return b"".join(header_parts(layout, inside))


def subset(header: Header, wanted: Callable[[str], bool]) -> Subset:
    """The file that holds only the tensors with a `wanted` name, in the order of the image."""
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
    """Cached: nearly every save needs the same string, of more than 100 KB."""
    return b" " * count


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
