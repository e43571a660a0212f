"""Reads generations with torch.distributed.checkpoint, whose planner reshards them, from memory slots or any storage.

    state = {"state": {"model": model.state_dict()}}
    torch.distributed.checkpoint.load(state, storage_reader=FlashReader("s3://bucket/run"))

Only what a rank needs is read, in ranges of whole chunks, each verified by its hash.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
from dlrover_hooks.checkpoint.state.pytree import unflatten
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.generation_images import Images, Stored, TensorPart, need
from dlrover_hooks.errors import NoCheckpoint
from dlrover_hooks.pytorch.dcp_writer import FlashStager, FlashWriter

__all__ = ["FlashReader", "FlashStager", "FlashWriter", "opened", "saved_values"]


class FlashReader(StorageReader):
    """Reads a generation of the tree at `url`: the newest complete one, or that of `step`. One thread.

    Names are those of the saved tree, joined by dots: the model saved by `AsyncCheckpointer` is under `state.model`.
    Only tensors can be loaded, no other Python state.

    Raises:
        NoCheckpoint: there is no such generation.
        Corrupt, StorageFailed: it is damaged, or cannot be read.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, step: int | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._url, self._step, self._options = os.fspath(url), step, dict(storage_options or {})
        self._copier = Copier()
        self._images: Images | None = None
        self._index: dict[str, Stored] | None = None

    @classmethod
    def over(cls, images: Images, index: dict[str, Stored], copier: Copier) -> FlashReader:
        """A reader of images that are open already; `index` lists the tensors it covers."""
        reader = cls("")
        reader._images, reader._index, reader._copier = images, index, copier
        return reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over; `checkpoint_id` replaces the URL."""
        if checkpoint_id is not None:
            self._url, self._index = os.fspath(checkpoint_id), None

    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """All tensors of the generation with their parts."""
        if self._index is None:
            self._images = opened(self._url, self._options, self._step)
            self._index = self._images.everything()
        return Metadata({name: _metadata(stored) for name, stored in self._index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **ignored: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read and verify what `plan` needs; nothing is copied yet."""
        need(_span(self._piece(item), item) for item in plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave every rank's plan unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the items of `plan` into the planner's tensors."""
        self.prepare_local_plan(plan)
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        torch_backend.copy(zip(targets, self._sources(plan), strict=True), self._copier)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if the tree at this URL has a generation."""
        return bool(generations.scan(os.fspath(checkpoint_id), None, None).manifests)

    def _sources(self, plan: LoadPlan) -> Iterator[torch.Tensor]:
        for item in plan.items:
            whole = torch_backend.source(self._piece(item), self._stored(item).dtype)
            region = zip(item.storage_offsets, item.lengths, strict=True)
            yield whole[tuple(slice(at, at + length) for at, length in region)]

    def _stored(self, item: ReadItem) -> Stored:
        assert self._index is not None, "read_metadata comes first"
        return self._index[item.storage_index.fqn]

    def _piece(self, item: ReadItem) -> TensorPart:
        offsets = tuple(item.storage_index.offset or ())
        return next(piece for piece in self._stored(item).pieces if piece.offsets == offsets)


def opened(url: str, options: Mapping[str, Any] | None = None, step: int | None = None) -> Images:
    """The images of a generation at `url`, not read yet: the newest complete one, or that of `step`.

    Raises:
        NoCheckpoint: there is no such generation; lists the existing ones.
    """
    manifests = generations.scan(url, options, None).manifests
    manifest = next((one for one in manifests if step in (None, one.generation.step)), None)
    if manifest is None:
        steps = ", ".join(str(one.generation.step) for one in manifests) or "none"
        what = "no whole generation" if step is None else f"no whole generation of step {step}"
        raise NoCheckpoint(f"{url} holds {what}; whole ones: {steps}")
    place = StorageFolder(url, options)
    return Images(manifest.generation, manifest.world_size, lambda rank: StoredImage(place, manifest, rank))


def saved_values(
    url: str | os.PathLike[str], *, step: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The Python values that a `FlashWriter` wrote beside the tensors, by dotted name: of the newest step or `step`.

    Raises:
        NoCheckpoint: there is no such generation.
        Corrupt, StorageFailed: it cannot be read.
    """
    images = opened(os.fspath(url), storage_options, step)
    try:
        found = [images.image(rank).header.inside().skeletons for rank in range(images.world_size)]
        return {name: unflatten(bytes(skeleton), {}) for part in found for name, skeleton in part.items()}
    finally:
        images.close()


def _metadata(stored: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in stored.pieces]
    properties = TensorProperties(dtype=torch_backend.dtype_of(stored.dtype))
    return TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)


def _span(piece: TensorPart, item: ReadItem) -> tuple[TensorPart, int, int]:
    """The bytes from the first to the last element of the region that `item` reads."""
    first = last = 0
    for length, at, count in zip(piece.shape, item.storage_offsets, item.lengths, strict=True):
        first, last = first * length + at, last * length + at + count - 1
    width = (piece.stop - piece.start) // max(1, math.prod(piece.shape))
    return piece, piece.start + first * width, piece.start + (last + 1) * width
