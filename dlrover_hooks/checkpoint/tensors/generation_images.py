"""The images of one generation, opened one by one, and the index of the tensors that they hold together. No torch.

An image comes from a keeper's slot (`KeeperSlotImage`) or from storage (`stored_image.StoredImage`). Only bytes that
were requested with `need` are present, and verified. An image must not be used after it is closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dlrover_hooks.checkpoint.memory.memcpy import Copier, place_of
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.checkpoint.state.safetensors_header import Header, WholeTensor, parse
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation

COMPLEX = "C128"
"""Dtype of a full tensor only: stored as F64 with a trailing dimension of 2."""


Delivery = tuple[int, int, int]
"""Bytes `start` to `stop` of an image, and the address in this process where they go."""


class Image(Protocol):
    """One rank's image. `view` has the length of the complete image."""

    header: Header
    view: memoryview

    def need(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read the bytes (start, stop) into `view`, verified. Raises Corrupt, StorageFailed."""
        ...

    def deliver(self, moves: Sequence[Delivery], copier: Copier, memory: Any) -> None:
        """Copy the bytes of `moves` to their addresses, verified. Raises Corrupt, StorageFailed.

        `memory`: the objects that own these addresses, kept alive as long as a write there is possible.
        """
        ...

    def check(self) -> None:
        """Verify that nothing copied from `view` was overwritten meanwhile. Raises Corrupt."""
        ...

    def close(self) -> None: ...


class KeeperSlotImage:
    """A slot of this node's keeper, which has verified it."""

    def __init__(self, shared: SharedSegment, slot: int, seq: int, nbytes: int, seat: int) -> None:
        self._shared, self._slot, self._seq, self._seat = shared, slot, seq, seat
        self.view = shared.view(slot, nbytes)
        self.header = parse(self.view)

    def need(self, spans: Iterable[tuple[int, int]]) -> None:
        """All bytes are present. Maps the pages now, so that the copy does not wait for page faults."""
        self._shared.fault_in(self._slot, len(self.view))

    def deliver(self, moves: Sequence[Delivery], copier: Copier, memory: Any) -> None:
        del memory
        deliver_from_view(self, moves, copier)

    def check(self) -> None:
        if self._shared.seq(self._slot) != self._seq:
            raise Corrupt(f"slot {self._slot} of seat {self._seat} was overwritten while it was loaded")

    def close(self) -> None:
        self.view.release()
        self._shared.close()


class TensorPart(NamedTuple):
    """The part of a tensor that begins at `offsets` of the full tensor: bytes `start` to `stop` of `image`."""

    image: Image
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


class Stored(NamedTuple):
    """A saved tensor: safetensors `dtype` (or "C128"), shape of the full tensor, and the pieces known so far."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharded: bool
    pieces: tuple[TensorPart, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the pieces make up the full tensor."""
        return sum(math.prod(piece.shape) for piece in self.pieces) == math.prod(self.shape)


class Images:
    """Images of `generation` by rank, opened on demand by `opener`. One thread."""

    def __init__(self, generation: Generation, world_size: int, opener: Callable[[int], Image]) -> None:
        self.generation, self.world_size = generation, world_size
        self._opener, self._open = opener, dict[int, Image]()

    def image(self, rank: int) -> Image:
        """`rank`'s image.

        Raises:
            Corrupt: it is missing or incomplete, or belongs to another rank or generation.
        """
        if rank not in self._open:
            image = self._open[rank] = self._opener(rank)
            inside = image.header.inside()
            if inside.format != 1:
                raise Corrupt(f"{self.generation}: format {inside.format} is that of a newer dlrover-hooks")
            if (inside.generation, inside.rank, inside.world_size) != (self.generation, rank, self.world_size):
                raise Corrupt(
                    f"{self.generation}: the image of rank {rank} of {self.world_size} says that it is of "
                    f"{inside.generation}, rank {inside.rank} of {inside.world_size}"
                )
        return self._open[rank]

    def index(self) -> dict[str, Stored]:
        """The tensors of the images opened so far, by name. Raises Corrupt where they disagree."""
        found: dict[str, Stored] = {}
        for image in self._open.values():
            _add(found, image)
        return found

    def everything(self) -> dict[str, Stored]:
        """The tensors of all images; each must be complete.

        Raises:
            Corrupt: an image or a piece of a tensor is missing.
        """
        for rank in range(self.world_size):
            self.image(rank)
        found = self.index()
        for stored in found.values():
            if not stored.is_whole:
                raise Corrupt(f"{self.generation}: the images of all ranks do not hold all of tensor {stored.name}")
        return found

    def check(self) -> None:
        """See `Image.check`."""
        for image in self._open.values():
            image.check()

    def close(self) -> None:
        """Close all images. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()


def _add(found: dict[str, Stored], image: Image) -> None:
    wholes, offsets = image.header.wholes(), image.header.offsets()
    for name, whole in wholes.items():
        if name not in image.header.tensors:
            _put(found, name, whole, None)
    for name, entry in image.header.tensors.items():
        whole = wholes.get(name) or WholeTensor(entry.shape, entry.dtype)
        shape, at = entry.shape, offsets[name]
        if whole.dtype == COMPLEX and entry.dtype == "F64" and entry.shape[-1:] == (2,):
            shape, at = shape[:-1], at[: len(shape) - 1]
        elif whole.dtype != entry.dtype:
            raise Corrupt(f"tensor {name} is of {entry.dtype}, as a whole of {whole.dtype}")
        _put(found, name, whole, TensorPart(image, at, shape, entry.start, entry.stop))


def _put(found: dict[str, Stored], name: str, whole: WholeTensor, piece: TensorPart | None) -> None:
    if piece is not None and not _fits(piece, whole):
        raise Corrupt(f"tensor {name}: {piece.shape} at {piece.offsets} is no part of {whole.shape}")
    known = found.setdefault(name, Stored(name, whole.dtype, whole.shape, whole.sharded, ()))
    if (known.dtype, known.shape, known.sharded) != (whole.dtype, whole.shape, whole.sharded):
        raise Corrupt(f"tensor {name} is {whole.dtype} {whole.shape} in one image, {known.dtype} {known.shape} before")
    if piece is not None and piece.offsets not in {other.offsets for other in known.pieces}:
        found[name] = known._replace(pieces=(*known.pieces, piece))


def _fits(piece: TensorPart, whole: WholeTensor) -> bool:
    if len(piece.offsets) != len(piece.shape) or len(piece.shape) != len(whole.shape):
        return False
    return all(
        at >= 0 and at + length <= end for at, length, end in zip(piece.offsets, piece.shape, whole.shape, strict=True)
    )


def need_all(stored: Iterable[Stored]) -> None:
    """Read all bytes of these tensors. Raises as `Image.need`."""
    need((piece, piece.start, piece.stop) for one in stored for piece in one.pieces)


def need(spans: Iterable[tuple[TensorPart, int, int]]) -> None:
    """Read these bytes of the pieces' images, with one call per image. Raises as `Image.need`."""
    by_image: dict[int, tuple[Image, list[tuple[int, int]]]] = {}
    for piece, start, stop in spans:
        by_image.setdefault(id(piece.image), (piece.image, []))[1].append((start, stop))
    for image, wanted in by_image.values():
        image.need(wanted)


def deliver(parts: Iterable[tuple[TensorPart, int]], copier: Copier, memory: Any) -> None:
    """Copy each piece's bytes to the address paired with it, in `memory`, verified. Raises as `Image.deliver`."""
    by_image: dict[int, tuple[Image, list[Delivery]]] = {}
    for piece, address in parts:
        by_image.setdefault(id(piece.image), (piece.image, []))[1].append((piece.start, piece.stop, address))
    for image, moves in by_image.values():
        image.deliver(moves, copier, memory)


def deliver_from_view(image: Image, moves: Sequence[Delivery], copier: Copier) -> None:
    """`Image.deliver` by a copy from the image's memory."""
    image.need((start, stop) for start, stop, _ in moves)
    base = place_of(image.view)
    copier.copy([(address, base + start, stop - start) for start, stop, address in moves])


def chosen(index: Mapping[str, Stored], parts: Iterable[str]) -> list[Stored]:
    """The tensors of the index that belong to the parts `parts` of the tree."""
    wanted = set(parts)
    return [stored for name, stored in index.items() if name.split(".", 1)[0] in wanted]
