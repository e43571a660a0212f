"""The gate of lazy saves: weights wait for the copy, and only they are copied behind the step.

Between a quiet point and the optimizer's step nothing changes parameters and optimizer state; forward and backward may
run while they are copied. The hook is torch's global one, so it catches every optimizer, also one a framework wraps.
What changes weights in another way is found by `Unchanged`: the save is dropped then, never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dlrover_hooks.checkpoint import snapshot
from dlrover_hooks.checkpoint.copying import Copier, Pieces

Extent = tuple[int, int]
"""Address and bytes."""
SAMPLE_BYTES = 64
_version = attrgetter("_version")


class Gate:
    """Calls `wait` before weights change: ahead of any optimizer's step, or behind its closure where one is passed.

    Behind, because with a closure (Lightning, LBFGS) forward and backward run inside of `step`. On whatever thread
    steps; `close` takes it away.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Idempotent."""
        self._hook.remove()

    @property
    def form(self) -> tuple[Any, ...]:
        """Changes with the optimizers, their groups and the number of their states."""
        return tuple((id(one), len(one.state), *(len(group["params"]) for group in one.param_groups))
                     for one in self._optimizers)  # fmt: skip

    def extents(self) -> set[Extent]:
        """Where everything lies that only a step of an optimizer seen so far changes: its parameters and its state."""
        return {
            (tensor.data_ptr(), tensor.nbytes)
            for optimizer in self._optimizers
            for tensor in _tensors(optimizer)
            if tensor.is_contiguous()
        }

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._optimizers.add(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._wait()
            return None

        def gated() -> Any:
            loss = closure()
            self._wait()
            return loss

        return ((args[0], gated, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": gated})


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    states = (value for state in optimizer.state.values() for value in state.values())
    for value in (*parameters, *states):
        if isinstance(value, torch.Tensor):
            yield snapshot.part(value)


class Samples:
    """Takes a few bytes of each of many tensors, or of their copies, at random places. `sizes` in bytes; made once."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], copier: Copier) -> None:
        self.addresses, self._copier, self._chance = addresses, copier, np.random.default_rng()
        self._words = np.asarray(addresses, np.uint64)
        total = np.asarray(sizes, np.int64)
        lengths = np.minimum(total, SAMPLE_BYTES)
        self._room = total - lengths + 1
        self._pieces = Pieces(np.cumsum(lengths) - lengths, lengths)

    def places(self) -> np.ndarray[Any, Any]:
        """Where in each tensor a sample is taken; other places each time."""
        return (self._chance.random(len(self._room)) * self._room).astype(np.uint64)

    def take(self, places: np.ndarray[Any, Any], copies: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
        """The bytes there, one after the other; those of the `copies` at these addresses, if they are given."""
        words = self._words if copies is None else np.asarray(copies, np.uint64)
        taken = np.empty(self._pieces.nbytes, np.uint8)
        self._copier.fill(self._pieces, taken.ctypes.data, words + places)
        return taken

    def tensor(self, offset: int) -> int:
        """Index of the tensor that byte `offset` of what was taken belongs to."""
        return int(self._pieces.of[np.searchsorted(self._pieces.ends, offset, "right")])


class Unchanged:
    """Finds out whether tensors were changed while they were being copied.

    By their version, which in-place operations raise, their address, which `.data = ` moves, and a few bytes of each,
    which fused kernels and raw pointers change without a word.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], samples: Samples) -> None:
        self._tensors, self._versions = tensors, _versions(tensors)
        self._samples, self._places = samples, samples.places()
        self._before = samples.take(self._places)

    def changed(self, copies: Sequence[int]) -> int | None:
        """Index of a tensor whose copy, at that address, may not be what it was; None if all are."""
        for before, now in (
            (self._samples.addresses, snapshot.addresses(self._tensors)),
            (self._versions, _versions(self._tensors)),
        ):
            if before != now:
                return next(index for index, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
        different = np.flatnonzero(self._samples.take(self._places, copies) != self._before)
        return self._samples.tensor(int(different[0])) if len(different) else None


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # tensors of inference mode have none
        return [0] * len(tensors)
