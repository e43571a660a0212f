"""The step snapshot: state that changes outside of an optimizer step, kept at each step boundary for rollback.

Parameters and optimizer state change only inside an optimizer step (`optimizer_gate` checks that). If the next step
fails half way before its optimizer step, they and this small snapshot together are still the complete state of the last
step.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlrover_hooks import rng
from dlrover_hooks.checkpoint.save.optimizer_gate import OptimizerGate, Traces

_foreach: Any = torch
"""Typed as Any because torch's stubs lack the operations on lists of tensors."""
SMALL_BYTES = 1 << 20
"""Tensors up to this size are copied at each step boundary (0.1 ms). For larger ones the version counter is checked."""

_FIXED = {type(None), bool, int, float, complex, str, bytes}
"""Immutable types, which need no copy."""


class StepSnapshot:
    """The step snapshot of one round. Training thread.

    Args:
        models: unwrapped.
        optimizers: those whose parameters and state are in the cut.
        extra: returns the states of schedulers, scalers and the like, as they go into a cut.
        check: called before each optimizer step; may raise to prevent it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        extra: Callable[[], Any],
        check: Callable[[], None],
    ) -> None:
        self._optimizers, self._read_extra, self._steps = optimizers, extra, _Steps(check)
        modules = [module for model in models for module in model.modules()]
        self._buffers = [module._buffers for module in modules if module._buffers]
        self._parameters = list[torch.Tensor](one for model in models for one in model.parameters())
        self._own = next((type(one).__name__ for one in modules if _has_own_state(one)), None)
        self.step: int | None = None
        """The step of this snapshot; None before the first."""
        self.random: rng.Taken
        """The RNG state of this snapshot."""
        self._copies = _Copies()
        self._saved_buffers = list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]]()
        self._gate = OptimizerGate(self._steps.begins)

    def keep(
        self,
        step: int,
        random: rng.Taken,
        extra: Callable[[], Any] | None = None,
        *,
        swaps: bool = False,
    ) -> None:
        """Take a snapshot at a step boundary: `step` is entirely over.

        `random`: the RNG state to keep with it. `extra`: replaces the usual one this time. `swaps`: other weights may
        be swapped in through `.data` afterwards, which does not raise the version, so changes are detected by the
        parameters' norms.
        """
        self.step, self._steps.begun = step, False
        self.random = random
        if self._buffers:
            self._saved_buffers = [(live, dict(live)) for live in self._buffers]
            self._copies.take([tensor for _, saved in self._saved_buffers for tensor in saved.values()])
        self._groups = [_settings(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        self._large = list[tuple[torch.Tensor, int]]()
        self._extra = self._copied((extra or self._read_extra)())
        self._traces = Traces(self._parameters)
        self._norms = _norms(self._parameters) if swaps else None

    def roll_back(self) -> str:
        """Restore the last snapshot. Returns an empty string, or why that is impossible; then nothing is changed."""
        if (reason := self._lost()) != "":
            return reason
        for live, saved in self._saved_buffers:
            live.update(saved)
        self._copies.put_back()
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        for group, settings in zip(groups, self._groups, strict=True):
            group.update(settings)
        return ""

    def stands(self) -> bool:
        """True if a rollback is possible."""
        return self._lost() == ""

    @property
    def stepped(self) -> bool:
        """True if an optimizer step was started."""
        return self._steps.begun or self.step is not None

    @property
    def extra(self) -> Any:
        """The result of `extra` at the last snapshot."""
        return self._extra

    def close(self) -> None:
        """Idempotent."""
        self._gate.close()

    def _lost(self) -> str:
        if self.step is None:
            return "no step was made yet"
        if self._own is not None:
            return f"{self._own} keeps a state of its own (get_extra_state)"
        if self._steps.begun:
            return "an optimizer's step was begun"
        if len(self._groups) != sum(len(optimizer.param_groups) for optimizer in self._optimizers):
            return "an optimizer has other groups of parameters"
        if self._traces.changed() is not None or self._swapped():
            return "a parameter was changed outside of an optimizer's step"
        if any(_version(tensor) != version for tensor, version in (*self._large, *self._copies.large)):
            return f"a tensor of more than {SMALL_BYTES >> 20} MiB was changed that is no parameter"
        return ""

    def _swapped(self) -> bool:
        now = _norms(self._parameters) if self._norms else ()
        return any(not torch.equal(one, other) for one, other in zip(self._norms or (), now, strict=True))

    def _copied(self, value: Any) -> Any:
        """A copy of `value`, whose containers and tensors may be changed in place later."""
        if type(value) in _FIXED:
            return value
        if isinstance(value, torch.Tensor):
            if value.nbytes <= SMALL_BYTES:
                return value.detach().clone()
            self._large.append((value, _version(value)))
            return value
        if type(value) in (dict, OrderedDict):
            copied = {key: one if type(one) in _FIXED else self._copied(one) for key, one in value.items()}
            return copied if type(value) is dict else OrderedDict(copied)
        if type(value) in (list, tuple):
            return type(value)([one if type(one) in _FIXED else self._copied(one) for one in value])
        return copy.deepcopy(value)


class _Steps:
    """Records optimizer steps. Holds no reference to the snapshot, because the optimizer hooks refer to this object."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self.begun = check, False

    def begins(self) -> None:
        self._check()
        self.begun = True


class _Copies:
    """Copies of small tensors, and the versions of large ones."""

    def __init__(self) -> None:
        self._tensors, self._copies = list[torch.Tensor](), list[torch.Tensor]()
        self.large = list[tuple[torch.Tensor, int]]()
        self._given = list[torch.Tensor | None]()

    def take(self, given: list[torch.Tensor | None]) -> None:
        """Copy the current values. The buffers are reused while the tensors stay the same."""
        if list(map(id, given)) != list(map(id, self._given)):
            self._given = given
            self._tensors = [one for one in given if one is not None and one.nbytes <= SMALL_BYTES]
            self._copies = [torch.empty_like(one) for one in self._tensors]
        if self._tensors:
            with torch.no_grad():
                _foreach._foreach_copy_(self._copies, self._tensors)
        self.large = [(one, _version(one)) for one in given if one is not None and one.nbytes > SMALL_BYTES]

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, copied in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copied)


@torch.no_grad()
def _norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return _foreach._foreach_norm(tensors)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters: learning rate, momentum and so on."""
    settings = group.copy()
    del settings["params"]
    for name, value in settings.items():
        if type(value) not in _FIXED and isinstance(value, torch.Tensor):
            settings[name] = value.detach().clone()
    return settings


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_own_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
