"""The gate of lazy saves: the optimizer waits for the copy of parameters and optimizer state.

Between a step boundary and the optimizer step nothing changes parameters and optimizer state; forward and backward may
run while they are copied. The hook is torch's global one, so it covers every optimizer, also one that a framework
wraps. `Unchanged` detects other changes of weights; the save is dropped then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dlrover_hooks.checkpoint.memory.memcpy import Copier, Pieces
from dlrover_hooks.checkpoint.tensors import torch_backend

Extent = tuple[int, int]
"""Address and bytes."""
SAMPLE_BYTES, CELL_BYTES = 64, 1 << 20
"""This many bytes of each cell are compared. Cells of 64 KiB would take 0.4 ms more per 500 MB, while a step waits."""
_version = attrgetter("_version")


class OptimizerGate:
    """Calls `wait` before weights change: before any optimizer step, or after its closure where one is passed.

    After the closure, because with one (Lightning, LBFGS) forward and backward run inside of `step`. Runs on the thread
    that steps; `close` removes the hook.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._newest: Callable[[], Optimizer | None] = lambda: None
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
        """Parameters and state of the optimizers seen so far: what only their steps change."""
        return {
            (tensor.data_ptr(), tensor.nbytes)
            for optimizer in self._optimizers
            for tensor in _tensors(optimizer)
            if tensor.is_contiguous()
        }

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._newest() is not optimizer:
            self._optimizers.add(optimizer)
            self._newest = weakref.ref(optimizer)
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
            yield torch_backend.part(value)


class MemoryHold:
    """Until `end`, calls that would free `memory` wait first: it is being copied, and would be unmapped.

    `untyped_storage().resize_(0)` is how FSDP frees parameters. Memory that is freed in C++ alone is not covered.
    """

    _holds: ClassVar[list[MemoryHold]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _plain: ClassVar[list[tuple[type, str, Any]]] = []

    def __init__(self, wait: Callable[[], None], memory: Sequence[torch.UntypedStorage]) -> None:
        self._wait, self._memory = wait, memory
        with self._lock:
            if not self._holds:
                self._install()
            self._holds.append(self)

    def end(self) -> None:
        """Any thread. Idempotent."""
        with self._lock:
            if self in self._holds:
                self._holds.remove(self)
            while self._plain and not self._holds:
                kind, name, own = self._plain.pop()
                delattr(kind, name) if own is None else setattr(kind, name, own)

    @classmethod
    def _install(cls) -> None:
        for kind, name in _GIVE_BACK:
            cls._plain.append((kind, name, vars(kind).get(name)))
            setattr(kind, name, _waiting(getattr(kind, name)))

    @classmethod
    def wait_for(cls, value: Any) -> None:
        """Return once nothing copies the memory of `value`, a tensor or a storage."""
        try:
            address = (value.untyped_storage() if isinstance(value, torch.Tensor) else value).data_ptr()
        except RuntimeError:  # sparse, or meta: it is never copied during a step
            return
        for hold in tuple(cls._holds):
            if any(one.data_ptr() == address for one in hold._memory):
                hold._wait()


_GIVE_BACK: tuple[tuple[type, str], ...] = (
    *((torch.UntypedStorage, name) for name in ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")),
    *((torch.Tensor, name) for name in ("resize_", "resize_as_")),
)
"""Methods that replace or free the bytes of a storage."""


def _waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def held(value: Any, *args: Any, **kwargs: Any) -> Any:
        MemoryHold.wait_for(value)
        return plain(value, *args, **kwargs)

    return held


class ByteSamples:
    """Takes a few bytes of each MiB of tensors, and of their copies, at random places. `sizes` in bytes.

    One check at a time: `take`, then `differing`, then `move` before the next. Any thread.
    """

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], copier: Copier) -> None:
        self.addresses, self._copier, self._chance = addresses, copier, np.random.default_rng()
        self._cells = Pieces(addresses, sizes, CELL_BYTES)
        total = self._cells.sizes.astype(np.int64)
        lengths = np.minimum(total, SAMPLE_BYTES)
        self._room = total - lengths + 1
        self._pieces = Pieces(np.cumsum(lengths) - lengths, lengths)
        self._before, self._after = np.empty((2, self._pieces.nbytes), np.uint8)
        self.move()

    def move(self) -> None:
        """Choose other places. Separate from `take`, which delays a step."""
        self._places = (self._chance.random(len(self._room)) * self._room).astype(np.uint64)
        self._froms = self._cells.offsets + self._places
        self._read = self._copier.reader(self._pieces, self._before.ctypes.data, self._froms)

    def take(self) -> None:
        """Record the bytes there."""
        self._read()

    def differing(self, copies: np.ndarray[Any, Any]) -> int | None:
        """Index of a tensor whose copy, at the given address, differs from the bytes taken; None if there is none."""
        froms = copies[self._cells.of] + self._cells.at + self._places
        self._copier.reader(self._pieces, self._after.ctypes.data, froms)()
        different = np.flatnonzero(self._after != self._before)
        if not len(different):
            return None
        return int(self._cells.of[np.searchsorted(self._pieces.ends, different[0], "right")])


class Traces:
    """Addresses and versions of tensors, which `.data = ` and in-place operations change.

    Tensors on a device have no other guard. The host does not wait for their copies before it begins a step, so the
    result of the first `changed`, which runs before that step, is the one that counts.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._before = tensors, (torch_backend.addresses(tensors), _versions(tensors))
        self._asking, self._found = threading.Lock(), list[int | None]()

    def changed(self) -> int | None:
        """Index of a tensor that was changed before the first call of this; None if there is none. Any thread."""
        with self._asking:
            if not self._found:
                self._found.append(_first_changed(self._tensors, *self._before))
            return self._found[0]


class Unchanged:
    """Detects whether tensors were changed while they were being copied.

    Compares their addresses and versions, and a few bytes of each MiB: fused kernels, raw pointers and writes to
    `.data` leave no other trace. A few rows changed in such a way are missed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], samples: ByteSamples) -> None:
        self._tensors, self._versions, self._samples = tensors, _versions(tensors), samples
        samples.take()

    def changed(self, copies: np.ndarray[Any, Any]) -> int | None:
        """Index of a tensor whose copy, at the given address, may be wrong; None if there is none."""
        index = _first_changed(self._tensors, self._samples.addresses, self._versions)
        if index is None:
            index = self._samples.differing(copies)
            self._samples.move()
        return index


def _first_changed(tensors: Sequence[torch.Tensor], addresses: Sequence[int], versions: Sequence[int]) -> int | None:
    for before, now in ((addresses, torch_backend.addresses(tensors)), (versions, _versions(tensors))):
        if before != now:
            return next(index for index, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
    return None


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # tensors made in inference mode have none
        return [0 if one.is_inference() else one._version for one in tensors]
