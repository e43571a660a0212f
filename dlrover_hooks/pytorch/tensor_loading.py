"""Loads saved tensors into live ones, at any world size and layout, in two phases: check and verify, then copy.

Tensors that are complete on both sides are copied by plain threads. Where either side is sharded, torch's own planner
selects the regions of the images that a tensor takes. No collective runs.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dlrover_hooks.checkpoint.restore.generation_loader import Opening
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.generation_images import Images, Stored, TensorPart, need_all
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.restored_value_check import listed

log = logging.getLogger("dlrover_hooks")


class Filling:
    """A `generation_loader.Fit`: copies from `opening` into `targets`, given by saved name.

    Raises:
        UsageError: shapes differ, or dtypes that are not both floating point.
        Corrupt, StorageFailed: data that they need is missing or damaged.
    """

    def __init__(self, opening: Opening, targets: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(targets)
        self._copier = opening.copier
        index = opening.images.index()
        _compare(self.tensors, index)
        sharded = {name for name, target in targets.items() if is_sharded(target) or index[name].sharded}
        self._whole = [(target, index[name]) for name, target in targets.items() if name not in sharded]
        need_all(stored for _, stored in self._whole)
        self._parts = _Parts(opening, {name: targets[name] for name in sharded}) if sharded else None

    def fill(self) -> None:
        """Copy; see `generation_loader.Fit`."""
        pairs = (
            (target.detach(), torch_backend.source(piece, stored.dtype))
            for target, stored in self._whole
            for piece in stored.pieces
        )
        torch_backend.copy(pairs, self._copier)
        if self._parts is not None:
            self._parts.fill()


class _Parts:
    """Tensors that are sharded on either side."""

    def __init__(self, opening: Opening, targets: dict[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        from dlrover_hooks.pytorch.dcp_reader import FlashReader

        index = _index(opening.images, targets)
        self._reader = FlashReader.over(opening.images, index, opening.copier)
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), self._reader.read_metadata(), is_coordinator=False)
        self._plan = self._reader.prepare_local_plan(self._planner.create_local_plan())

    def fill(self) -> None:
        self._reader.read_data(self._plan, self._planner)


class _TensorRegion(NamedTuple):
    """The part of a tensor of shape `whole` that this rank takes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def is_in(self, stored: Stored) -> bool:
        """True if the parts known so far cover the region."""
        return stored.is_whole or sum(map(self._common, stored.pieces)) == math.prod(self.shape)

    def _common(self, piece: TensorPart) -> int:
        """Number of elements in the intersection."""
        sides = zip(self.offsets, self.shape, piece.offsets, piece.shape, strict=True)
        return math.prod(max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in sides)

    def ranks(self, stored: Stored) -> range:
        """The saved ranks that are likely to hold the region.

        torch cuts a dimension into equal parts, the last ones shorter, and assigns them rank by rank. So one known part
        determines all; the first rank's is never empty.
        """
        if not stored.pieces:
            return range(1)
        piece = max(stored.pieces, key=lambda one: math.prod(one.shape))
        for at, length, size, part in zip(self.offsets, self.shape, self.whole, piece.shape, strict=True):
            if 0 < part < size:
                return range(at // part, -(-(at + length) // part))
        return range(0)


def _index(images: Images, targets: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """The index of as few images as cover `targets`: all ranks together open W images, not W^2."""
    index, asked = images.index(), set[int]()
    wanted = {name: _region(name, target) for name, target in targets.items()}
    while wanted := {name: region for name, region in wanted.items() if not region.is_in(index[name])}:
        likely = set(itertools.chain.from_iterable(region.ranks(index[name]) for name, region in wanted.items()))
        ranks = sorted(likely.intersection(range(images.world_size)) - asked)
        if not ranks:
            return images.everything()
        for rank in ranks:
            images.image(rank)
        asked.update(ranks)
        index = images.index()
    return index


def _region(name: str, target: torch.Tensor) -> _TensorRegion:
    whole = tuple(target.shape)
    if not is_sharded(target):
        return _TensorRegion((0,) * len(whole), whole, whole)
    shape = tuple(torch_backend.part(target).shape)
    return _TensorRegion(torch_backend.specs({name: target})[0].offsets[: len(shape)], shape, whole)


def is_sharded(tensor: Any) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "device_mesh")


def _compare(targets: Mapping[str, torch.Tensor], index: Mapping[str, Stored]) -> None:
    wrong: list[str] = []
    converted: list[str] = []
    for name, target in targets.items():
        stored = index[name]
        dtype = torch_backend.dtype_of(stored.dtype)
        if tuple(target.shape) != stored.shape:
            wrong.append(f"{name} was saved as {list(stored.shape)}, here it is {list(target.shape)}")
        elif target.dtype is not dtype and target.is_floating_point() and dtype.is_floating_point:
            converted.append(f"{name} from {dtype} to {target.dtype}")
        elif target.dtype is not dtype:
            wrong.append(f"{name} was saved as {dtype}, here it is {target.dtype}")
    refuse(wrong, "Build the model as it was when it was saved, or start over (resume='never').")
    if converted:
        log.warning("the checkpoint is converted: %s", listed(converted))


def refuse(problems: Sequence[str], hint: str) -> None:
    """Raise UsageError with the first problems and their total number, if there are any."""
    if problems:
        raise UsageError(f"the checkpoint does not fit: {listed(problems)}", hint=hint)


def refuse_sharded(tensors: Mapping[str, Any]) -> None:
    """For adapters that restore full tensors only. Raises UsageError if some are DTensors."""
    found = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    if found:
        raise UsageError(
            f"sharded state is not kept under this framework: {listed(found)}",
            hint="use AsyncCheckpointer in a loop of your own, or DistributedDataParallel",
        )


def left_alone(strategy: str, framework: str, on_error: str) -> str:
    """Why nothing is saved or resumed under `strategy`, if training continues without it (`on_error` "warn").

    Raises:
        UsageError: with `on_error` "raise", so that users do not find out in a crash that there are no checkpoints.
    """
    reason = (
        f"{strategy} shards or moves state in a way of its own, and under {framework} state is kept with "
        "DistributedDataParallel or on a single device only: nothing would be saved, and nothing resumed"
    )
    hint = (
        "for a model that must be sharded use torch's fully_shard (FSDP2) and AsyncCheckpointer in a loop of your own; "
        "on_error='warn' trains on without dlrover-hooks"
    )
    if on_error == "raise":
        raise UsageError(reason, hint=hint)
    return f"{reason}. HINT: {hint}"
