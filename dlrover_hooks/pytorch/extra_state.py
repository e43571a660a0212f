"""The `extra` parts that `AsyncCheckpointer` keeps beside model and optimizer, each with a unique name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from dlrover_hooks.errors import UsageError
from dlrover_hooks.pytorch.state_dict import NamedOptimizer
from dlrover_hooks.pytorch.tensor_loading import refuse


class Stateful(Protocol):
    """An element of `extra`: scheduler, scaler, EMA, metric."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Extras:
    """The parts of `extra` with their names, by which their states are found again, in whatever order they are given.

    In a mapping the keys are the names. In a sequence a part is named by its class, a scheduler also by its optimizer.

    Raises:
        UsageError: two parts of a sequence have the same name, so that a restore could exchange their states.
    """

    def __init__(self, extra: Iterable[Stateful] | Mapping[str, Stateful], model: nn.Module) -> None:
        given: Any = extra  # pyright narrows an Iterable to a Mapping of unknown values
        named: list[tuple[str, Stateful]] = (
            [*given.items()] if isinstance(extra, Mapping) else [(_name(one, model), one) for one in given]
        )
        self.names = [name for name, _ in named]
        self.parts = [_by_names(part, model) for _, part in named]
        alike = [f"{count} times {name}" for name, count in Counter(self.names).items() if count > 1]
        if alike:
            raise UsageError(
                f"`extra` has {' and '.join(alike)}: nothing tells which state belongs to which",
                hint='name them: extra={"teacher": teacher, "student": student}',
            )

    def states(self) -> list[Any]:
        """The states of all parts, in order."""
        return [part.state_dict() for part in self.parts]

    def places(self, saved: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Each part with the index of its state in `saved`, the state of a cut.

        Raises:
            UsageError: the saved states belong to other parts.
        """
        states, names = saved["extra"], saved.get("extra_names")
        if len(states) != len(self.parts):
            counts = f"`extra` had {len(states)} parts, here it has {len(self.parts)}"
            refuse([counts], "give the same parts, or start over (resume='never')")
        if names is None:  # saved by an older version: by order
            return list(enumerate(self.parts))
        if sorted(names) != sorted(self.names):
            refuse(
                [f"`extra` was {', '.join(names)}; here it is {', '.join(self.names)}"],
                "give the same parts, or start over (resume='never')",
            )
        return [(names.index(name), part) for name, part in zip(self.names, self.parts, strict=True)]


def _by_names(part: Stateful, model: nn.Module) -> Stateful:
    return NamedOptimizer(part, model) if isinstance(part, torch.optim.Optimizer) else part


def _name(part: Any, model: nn.Module) -> str:
    kind = type(part).__name__
    optimizer = part if isinstance(part, torch.optim.Optimizer) else getattr(part, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return kind
    return f"{kind} of {NamedOptimizer(optimizer, model).first_name()}"
