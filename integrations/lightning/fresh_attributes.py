"""A Trainer, its module and its callbacks as the first life of a fit found them.

A worker that replaces a lost one makes all of them anew. The survivors have theirs already, with attributes in them
that are in no checkpoint (`ModelCheckpoint` remembers the step it saved last), and ranks that do not agree in those do
not come to the same collectives. So a life begins with the same for all; what is restored comes over it.
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
from dlrover_hooks.integrations.lightning import _compat as private

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, PurePath, enum.Enum, datetime.timedelta, datetime.datetime,
)  # fmt: skip
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class FreshAttributes:
    """All but parameters, which an optimizer alone changes. Taken in `setup`, put back in each later one."""

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
        """When a life was left. Lightning puts a `forward` of its own into the module for each step, which holds the
        wrapped model and runs a training step; a fault within DDP, before the module is called, leaves it there.
        """
        vars(self._module).pop("forward", None)
        vars(self._module).update(self._forward)

    @torch.no_grad()
    def put_back(self, trainer: Trainer) -> None:
        """The fault may have come in a validation, or between a `toggle_optimizer` and its end."""
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
    """The plain attributes of one object: numbers, texts, small tensors."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._names = frozenset(self._all())
        self._kept = {name: copy.deepcopy(value) for name, value in self._all().items() if is_plain(value)}

    def put_back(self) -> None:
        """Later ones are removed. What is something else and always was stays."""
        live = vars(self._owner)
        for name in [name for name, value in self._all().items() if name not in self._names and is_plain(value)]:
            del live[name]
        live.update(copy.deepcopy(self._kept))

    def _all(self) -> dict[str, Any]:
        found = vars(self._owner) if hasattr(self._owner, "__dict__") else {}
        aside = _OF_ANY_MODULE if isinstance(self._owner, nn.Module) else frozenset[str]()
        return {name: value for name, value in found.items() if name not in aside}


def others(trainer: Trainer) -> list[Any]:
    """The callbacks that are not ours, nor made from ours."""
    return [one for one in private.callbacks(trainer) if not any(_is_ours(kind) for kind in type(one).__mro__)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "dlrover_hooks"


def is_plain(value: Any) -> bool:
    """Is it worth as much as a copy of it? Containers are not: they are where users collect what they want to see."""
    small = type(value) is torch.Tensor and value.is_leaf and value.nbytes <= SMALL_BYTES
    return small or isinstance(value, _PLAIN)
