"""The gate of lazy saves: weights wait for the copy, and only they are copied behind the step.

Between a quiet point and the optimizer's step nothing changes parameters and optimizer state; forward and backward may
run while they are copied. The hook is torch's global one, so it catches every optimizer, also one a framework wraps.
What changes weights in another way is found by `Unchanged`: the save is dropped then, never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dlrover_hooks.checkpoint import snapshot
from dlrover_hooks.checkpoint.copying import Copier, Pieces

Extent = tuple[int, int]
"""Address and bytes."""
SAMPLE_BYTES, SAMPLES = 64, 2


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


class Unchanged:
    """Finds out whether tensors were changed while they were being copied.

    By their version, which in-place operations raise, their address, which `.data = ` moves, and a few bytes of each,
    which fused kernels and raw pointers change without a word. `seed`: other places at each save.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copier: Copier, seed: int) -> None:
        self._tensors, self._copier = tensors, copier
        self._before = self._marks()
        sizes = np.repeat(np.array([tensor.nbytes for tensor in tensors], np.int64), SAMPLES)
        lengths = np.minimum(sizes, SAMPLE_BYTES)
        spots = np.random.default_rng(seed).random(len(sizes)) * (sizes - lengths + 1)
        self._at, self._pieces = spots.astype(np.uint64), Pieces(np.cumsum(lengths) - lengths, lengths)
        self._samples = self._take(np.array([tensor.data_ptr() for tensor in tensors], np.uint64))

    def changed(self, copies: Sequence[int]) -> int | None:
        """Index of a tensor whose copy, at that address, may not be what it was; None if all are."""
        moved = [index for index, (a, b) in enumerate(zip(self._before, self._marks(), strict=True)) if a != b]
        if moved:
            return moved[0]
        different = np.flatnonzero(self._take(np.asarray(copies, np.uint64)) != self._samples)
        if not len(different):
            return None
        piece = np.searchsorted(self._pieces.ends, different[0], "right")
        return int(self._pieces.of[piece]) // SAMPLES

    def _marks(self) -> list[Extent]:
        return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in self._tensors]

    def _take(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        taken = np.empty(self._pieces.nbytes, np.uint8)
        self._copier.fill(self._pieces, taken.ctypes.data, np.repeat(addresses, SAMPLES) + self._at)
        return taken
