"""Restores the attributes of a Trainer, its module and its callbacks to those before the first round of a fit.

A worker that replaces a lost one creates all of these objects. The survivors' objects exist already, with attributes
that are in no checkpoint (`ModelCheckpoint` has the step it saved last). Ranks that differ in those do not reach the
same collectives. So each round begins with the same attributes on all ranks, before the restore.
"""

from __future__ import annotations

import copy
import datetime
import enum
from pathlib import PurePath
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchmetrics import Metric

from dlrover_hooks.elastic.step_snapshot import SMALL_BYTES
from dlrover_hooks.integrations.lightning import _private_api as private

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, PurePath, enum.Enum, datetime.timedelta, datetime.datetime,
)  # fmt: skip
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class FreshAttributes:
    """Everything except parameters, which only an optimizer changes. Taken in `setup`, put back in each later one."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._module = module
        self._forward = {name: value for name, value in vars(module).items() if name == "forward"}
        self._progress = copy.deepcopy(private.progress(trainer))
        self._modules = [(one, one.training) for one in module.modules()]
        self._frozen = [(one, one.requires_grad) for one in module.parameters()]
        self._buffers = [(one, one.detach().clone()) for one in module.buffers()]
        owners = [*module.modules(), *others(trainer), *private.datamodules(trainer)]
        self._attributes = [Attributes(one) for one in owners]

    def let_go(self) -> None:
        """Call when a round is left: restores the module's `forward`.

        For each step Lightning puts its own `forward` into the module, which holds the wrapped model and runs a
        training step. A fault within DDP, before the module is called, leaves it there.
        """
        vars(self._module).pop("forward", None)
        vars(self._module).update(self._forward)

    @torch.no_grad()
    def put_back(self, trainer: Trainer) -> None:
        """Restore everything. The fault may have come in a validation, or between a `toggle_optimizer` and its end."""
        private.set_progress(trainer, copy.deepcopy(self._progress))
        for attributes in self._attributes:
            attributes.put_back()
        for module, training in self._modules:
            module.training = training
            if isinstance(module, Metric):
                module.reset()
        for parameter, wanted in self._frozen:
            parameter.requires_grad_(wanted)
        for buffer, value in self._buffers:
            buffer.copy_(value)


class Attributes:
    """The plain attributes of one object: numbers, strings, small tensors."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._names = frozenset(self._all())
        self._kept = {name: copy.deepcopy(value) for name, value in self._all().items() if is_plain(value)}

    def put_back(self) -> None:
        """Restore plain attributes and remove those added later. Attributes of other types stay as they are."""
        live = vars(self._owner)
        for name in [name for name, value in self._all().items() if name not in self._names and is_plain(value)]:
            del live[name]
        live.update(copy.deepcopy(self._kept))

    def _all(self) -> dict[str, Any]:
        found = vars(self._owner) if hasattr(self._owner, "__dict__") else {}
        aside = _OF_ANY_MODULE if isinstance(self._owner, nn.Module) else frozenset[str]()
        return {name: value for name, value in found.items() if name not in aside}


def others(trainer: Trainer) -> list[Any]:
    """The callbacks that are neither dlrover-hooks' own nor derived from them."""
    return [one for one in private.callbacks(trainer) if not any(_is_ours(kind) for kind in type(one).__mro__)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "dlrover_hooks"


def is_plain(value: Any) -> bool:
    """True for immutable values and small leaf tensors. Not for containers, in which users collect results."""
    small = type(value) is torch.Tensor and value.is_leaf and value.nbytes <= SMALL_BYTES
    return small or isinstance(value, _PLAIN)
