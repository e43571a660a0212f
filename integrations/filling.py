"""Saved tensors into live ones, at any world size and layout, in two phases: checked and verified first, copied later.

What is whole on both sides is copied by plain threads. Where either side is sharded, torch's own planner says which
regions of which images a tensor takes. No collective runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlrover_hooks.checkpoint import snapshot
from dlrover_hooks.checkpoint.images import Stored, need_all
from dlrover_hooks.checkpoint.restoring import Opening
from dlrover_hooks.errors import UsageError

log = logging.getLogger("dlrover_hooks")
SHOWN = 5


class Filling:
    """A `restoring.Fit`: `targets` by saved name take what `opening` holds.

    Raises:
        UsageError: shapes differ, or dtypes that are not both of floating point.
        Corrupt, StorageFailed: what they need is not there whole.
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
        """Copy; see `restoring.Fit`."""
        pairs = (
            (target.detach(), snapshot.source(piece, stored.dtype))
            for target, stored in self._whole
            for piece in stored.pieces
        )
        snapshot.copy(pairs, self._copier)
        if self._parts is not None:
            self._parts.fill()


class _Parts:
    """Tensors of which either side has only a part here."""

    def __init__(self, opening: Opening, targets: dict[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        from dlrover_hooks.integrations.dcp import FlashReader

        index = opening.images.index()
        if not all(_is_here(target, index[name]) for name, target in targets.items()):
            index = opening.images.everything()
        self._reader = FlashReader.over(opening.images, index, opening.copier)
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), self._reader.read_metadata(), is_coordinator=False)
        self._plan = self._reader.prepare_local_plan(self._planner.create_local_plan())

    def fill(self) -> None:
        self._reader.read_data(self._plan, self._planner)


def is_sharded(tensor: Any) -> bool:
    """Is it a DTensor?"""
    return hasattr(tensor, "device_mesh")


def _is_here(target: Any, stored: Stored) -> bool:
    """Is the region that `target` takes one piece of an image that is open already?"""
    if stored.is_whole:
        return True
    if not is_sharded(target):
        return False
    spec, shape = snapshot.specs({stored.name: target})[0], tuple(snapshot.part(target).shape)
    at = spec.offsets[: len(shape)]
    return 0 in shape or any((piece.offsets, piece.shape) == (at, shape) for piece in stored.pieces)


def _compare(targets: Mapping[str, torch.Tensor], index: Mapping[str, Stored]) -> None:
    wrong: list[str] = []
    converted: list[str] = []
    for name, target in targets.items():
        stored = index[name]
        dtype = snapshot.dtype_of(stored.dtype)
        if tuple(target.shape) != stored.shape:
            wrong.append(f"{name} was saved as {list(stored.shape)}, here it is {list(target.shape)}")
        elif target.dtype is not dtype and target.is_floating_point() and dtype.is_floating_point:
            converted.append(f"{name} from {dtype} to {target.dtype}")
        elif target.dtype is not dtype:
            wrong.append(f"{name} was saved as {dtype}, here it is {target.dtype}")
    refuse(wrong, "Build the model as it was when it was saved, or start anew (resume='never').")
    if converted:
        log.warning("the checkpoint is converted: %s", listed(converted))


def refuse(problems: Sequence[str], hint: str) -> None:
    """Raise UsageError with the first problems and the number of all, if there are any."""
    if problems:
        raise UsageError(f"the checkpoint does not fit: {listed(problems)}", hint=hint)


def refuse_sharded(tensors: Mapping[str, Any]) -> None:
    """For adapters that restore whole tensors. Raises UsageError if some are DTensors."""
    found = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    if found:
        raise UsageError(
            f"sharded state is not kept under this framework: {listed(found)}",
            hint="use AsyncCheckpointer in a loop of your own, or DistributedDataParallel",
        )


def own_state(state: Mapping[str, Any], key: str, adapter: str) -> Any:
    """`state[key]`, which `adapter` keeps there. Raises UsageError if another adapter has saved this state."""
    if key not in state:
        raise UsageError(
            f"the checkpoint was not saved by {adapter}: it holds {listed(sorted(state))}",
            hint="resume with the adapter that saved it, or export it: dlrover-hooks ckpt export",
        )
    return state[key]


def listed(names: Sequence[str]) -> str:
    """The first few of `names`, and how many there are."""
    more = f"; {len(names)} in all" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more
