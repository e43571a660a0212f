"""Model and optimizer as one state whose names do not depend on world size, layout or wrapper.

Parameters are named as in the unwrapped model, in the optimizer's state too, as in
`torch.distributed.checkpoint.state_dict`. Unlike there, nothing is gathered, and no optimizer step is run to allocate
the state to be restored: its tensors are created like the parameters they belong to, in the saved dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks.checkpoint.tensors.generation_images import Stored
from dlrover_hooks.checkpoint.tensors.torch_backend import dtype_of
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.restored_value_check import listed, own_state, require
from dlrover_hooks.pytorch.tensor_loading import is_sharded, refuse

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_OTHER_MODEL = "give the model and the optimizer the same parameters as before, or start over (resume='never')"


def bare(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile.

    Raises:
        UsageError: it is sharded by FSDP1, whose state depends on its layout.
    """
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model.get_submodule("_orig_mod")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) keeps parameters under names of its own layout",
            hint="shard the model with torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    return model


class GroupForm(msgspec.Struct):
    params: list[int | str]


class OptimizerForm(msgspec.Struct):
    """The parts of a `torch.optim.Optimizer` state that this package and torch rely on."""

    state: dict[Any, Any]
    param_groups: list[GroupForm]


class _NamedGroupForm(msgspec.Struct):
    params: list[str]


class _NamedForm(msgspec.Struct):
    """The form of `NamedOptimizer.state_dict`."""

    state: dict[Any, Any]
    param_groups: list[_NamedGroupForm]


class WholeState:
    """The state of `model` (unwrapped) and `optimizer`. Training thread."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self._optimizer = model, NamedOptimizer(optimizer, model)

    def save(self) -> dict[str, Any]:
        """The live tensors, by name."""
        return {"model": self._named(), "optimizer": self._optimizer.state_dict()}

    def load(self, saved: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Load `saved` (see `save`). Its tensors are those returned by `targets`, where that returned any."""
        model: dict[str, Any] = saved["model"]
        live: dict[str, str] = {_plain(name): name for name in self.model.state_dict()}
        self.model.load_state_dict({live.get(name, name): value for name, value in model.items()})
        if not weights_only:
            self._optimizer.load_state_dict(saved["optimizer"])

    def targets(self, saved: Mapping[str, Any], *, weights_only: bool = False) -> dict[str, torch.Tensor]:
        """The tensors to fill for `saved`, by saved name; `saved` has `Stored` in place of tensors.

        Raises:
            UsageError: keys, or parameters of the optimizer, are not those that were saved.
        """
        model = own_state(saved, "model", "AsyncCheckpointer")
        require(model, dict[str, Any], "the state of the model")
        found = self._model_targets(model)
        return found if weights_only else found | self._optimizer.targets(saved["optimizer"])

    def _named(self) -> dict[str, Any]:
        return {_plain(name): value for name, value in self.model.state_dict().items()}

    def _model_targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        live = self._named()
        _same_keys(saved.keys(), live.keys(), "model.")
        found: dict[str, torch.Tensor] = {}
        for name, stored in saved.items():
            if isinstance(stored, Stored) and isinstance(live[name], torch.Tensor):
                found.setdefault(stored.name, live[name])
        return found


class NamedOptimizer:
    """`optimizer`, with its parameters named as in `model` (unwrapped); parameters outside it by group and index."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        found: Mapping[nn.Parameter, str] = {parameter: _plain(name) for name, parameter in model.named_parameters()}
        self._known = found
        self._checked = 0
        """Number of parameters with a state at the last check."""

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, by name.

        Raises:
            UsageError: the state of a sharded parameter could not be restored.
        """
        if len(self._optimizer.state) != self._checked:
            self._check()
            self._checked = len(self._optimizer.state)
        state, names = self._optimizer.state_dict(), self._names()
        return state | {
            "class": type(self._optimizer).__name__,
            "state": {_name(names, number): value for number, value in state["state"].items()},
            "param_groups": [
                group | {"params": [names[i] for i in group["params"]]} for group in state["param_groups"]
            ],
        }

    def _check(self) -> None:
        wrong = [
            f"{key} of parameter {name} is {_said(value)}, the parameter is {_said(parameter)}"
            for name, parameter in zip(self._names(), self._parameters(), strict=True)
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and not _follows(value, parameter)
        ]
        if wrong:
            raise UsageError(
                f"state of the optimizer is not sharded as its parameters, and could not be restored: {listed(wrong)}",
                hint="use an optimizer whose state is shaped like its parameters (AdamW, SGD), not a factored one "
                "(Adafactor), or do not shard the model (DistributedDataParallel)",
            )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load `saved` in its own dtypes."""
        numbered = self._numbered(saved)
        self._optimizer.load_state_dict(numbered)
        exact_optimizer_states([self._optimizer], [numbered])

    def targets(self, saved: Any) -> dict[str, torch.Tensor]:
        """See `WholeState.targets`."""
        if not isinstance(saved, Mapping) or "param_groups" not in saved:
            refuse(["here is an optimizer where the checkpoint has something else"], "give the parts in the same order")
        require(saved, _NamedForm, "the state of an optimizer")
        refuse_other_class(self._optimizer, saved, saved.get("class"))
        live, groups = self._names(), saved["param_groups"]
        _same_keys([name for group in groups for name in group["params"]], live, "optimizer.")
        if len(groups) != len(self._optimizer.param_groups):
            refuse([f"the optimizer had {len(groups)} groups, here {len(self._optimizer.param_groups)}"], _OTHER_MODEL)
        found: dict[str, torch.Tensor] = {}
        wrong: list[str] = []
        for name, parameter in zip(live, self._parameters(), strict=True):
            require(of_one := saved["state"].get(name, {}), dict[Any, Any], f"the optimizer's state of {name}")
            for stored in _tensors(of_one):
                if stored.shape == tuple(parameter.shape) and (is_sharded(parameter) or stored.sharded):
                    found[stored.name] = _like(parameter, stored)
                elif stored.sharded:
                    wrong.append(f"{stored.name} is sharded, but shaped unlike its parameter")
        refuse(wrong, "resume='weights' begins with the weights alone")
        return found

    def first_name(self) -> str:
        """The name of its first parameter, which distinguishes it from the model's other optimizers."""
        return next(iter(self._names()), "no parameter")

    def _names(self) -> list[str]:
        """The names of the optimizer's parameters, in index order."""
        groups = enumerate(self._optimizer.param_groups)
        return [self._known.get(one, f"{g}.{i}") for g, group in groups for i, one in enumerate(group["params"])]

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters, in the same order."""
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _numbered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """`saved` with parameter names replaced by their indices here."""
        number = {name: index for index, name in enumerate(self._names())}
        live = self._optimizer.state_dict()["param_groups"]
        groups = zip(saved["param_groups"], live, strict=True)
        return {
            **saved,
            "state": {number.get(name, name): value for name, value in saved["state"].items()},
            "param_groups": [{**group, "params": here["params"]} for group, here in groups],
        }


def _follows(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """True if `value` is the same on all ranks, or sharded as `parameter` is."""
    if not is_sharded(parameter) or not any(one.is_shard() for one in parameter.placements):  # pyright: ignore[reportAttributeAccessIssue]
        return True
    return value.shape == parameter.shape if is_sharded(value) else value.numel() <= 1


def _said(tensor: torch.Tensor) -> str:
    if is_sharded(tensor):
        return f"a DTensor of shape {list(tensor.shape)}"
    return f"a tensor of this rank alone, of shape {list(tensor.shape)}"


def _like(parameter: torch.Tensor, stored: Stored) -> torch.Tensor:
    return torch.empty_like(parameter, dtype=dtype_of(stored.dtype), requires_grad=False)


def _tensors(value: Any) -> Iterator[Stored]:
    if isinstance(value, Stored):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _name(names: list[str], number: Any) -> Any:
    return names[number] if isinstance(number, int) else number


@functools.lru_cache(maxsize=1 << 16)
def _plain(name: str) -> str:
    """Cached, so that every save returns the identical string, which compares quickly."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _same_keys(saved: Iterable[str], live: Iterable[str], where: str) -> None:
    then, now = dict.fromkeys(saved), dict.fromkeys(live)
    missing = [f"{where}{name} is not in the checkpoint" for name in now if name not in then]
    extra = [f"{where}{name} is in the checkpoint only" for name in then if name not in now]
    refuse(missing + extra, _OTHER_MODEL)


def refuse_other_class(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], named: str | None) -> None:
    """Refuse a state of another optimizer class, which would otherwise fail in mid-step. `named`: the saved class.

    None if an older version saved it. A difference is then detected from options that only one of the two classes has.

    Raises:
        UsageError: names both classes and the options that only one has.
    """
    now = type(optimizer).__name__
    then = {option for group in saved["param_groups"][:1] for option in group} - {"params", "initial_lr"}
    live = set(optimizer.defaults)
    if now != named if named is not None else (then - live and live - then):
        was = f"{named or 'of another class'} ({_alone(then - live)})"
        refuse(
            [f"the optimizer was {was}, here it is {now} ({_alone(live - then)})"],
            "give the optimizer of before, or take the weights alone (resume='weights')",
        )


def _alone(options: set[Any]) -> str:
    return f"has {', '.join(sorted(map(str, options)))}" if options else "no other options"


def exact_optimizer_states(optimizers: list[torch.optim.Optimizer], saved: list[dict[str, Any]]) -> None:
    """Undo the cast of `Optimizer.load_state_dict` to the parameter's dtype (fp32 moments of bf16 weights)."""
    for optimizer, state in zip(optimizers, saved, strict=True):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, entries in state["state"].items():
            if not isinstance(index, int):
                continue
            live = optimizer.state[parameters[index]]
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and live[name].dtype != value.dtype:
                    live[name] = value.to(live[name].device, copy=True)
