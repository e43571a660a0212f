"""Copies of entire state trees, for files that are written overlapped with the steps.

Tensors are copied by storage, as torch's own files hold them: tensors that share memory share it in the copy too, and
strides and views stay. Plain threads copy (`Copier`) into memory that is populated beforehand and reused. Everything
else in the tree is deep-copied, so that training changes nothing in the copy.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dlrover_hooks.checkpoint.memory.memcpy import Copier, Move
from dlrover_hooks.errors import CheckpointError, UnsupportedState
from dlrover_hooks.host.fork_guard import ForkGuard

ALIGN = 64
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in Python's mmap
_WAIT_S = 600.0


class StateTreeCopies:
    """At most `count` copies at a time; their memory is reused once nothing refers to a copy any more.

    The memory grows to the size of the largest tree seen and is not inherited by forked processes. `take` is called on
    one thread; a copy may be dropped on any.
    """

    def __init__(self, count: int = 2, *, copier: Copier | None = None) -> None:
        self._count = count
        self._copier = copier or Copier()
        self._regions: list[_StagingMemory] = []
        self._dropped = threading.Condition()
        self._here = ForkGuard()

    def take(self, tree: Any, *, timeout_s: float = _WAIT_S) -> Any:
        """An independent copy of `tree`, its tensors on the CPU.

        Raises:
            UnsupportedState: something in it cannot be copied; names its type.
            CheckpointError: all copies are still in use after `timeout_s`, or this is a forked child.
        """
        if not self._here:
            raise CheckpointError("a forked child has no memory for copies", hint="save in the process that trains")
        tensors = {id(one): one for one in _tensors(tree)}
        places = _Places()
        for tensor in tensors.values():
            for part in _parts(tensor):
                places.add(part)
        region = self._free(places.total, timeout_s) if places.total else None
        memory = region.lend(self._told) if region is not None else np.empty(0, np.uint8)
        places.copy_to(memory, self._copier)
        memo: dict[int, Any] = {key: _rebuilt(tensor, places) for key, tensor in tensors.items()}
        try:
            return copy.deepcopy(tree, memo)
        except (TypeError, RuntimeError, RecursionError, NotImplementedError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise UnsupportedState(f"the state cannot be copied: {reason}", hint="keep such an object out of the state")

    def close(self) -> None:
        """Free the memory as soon as the copies are dropped."""
        self._regions.clear()

    def _told(self) -> None:
        if not self._here:
            return
        with self._dropped:
            self._dropped.notify_all()

    def _free(self, nbytes: int, timeout_s: float) -> _StagingMemory:
        """The largest unused region, replaced if it is too small; a new one while there are fewer than `count`."""
        with self._dropped:
            free = self._dropped.wait_for(self._choice, timeout_s)
        if free is None:
            raise CheckpointError(
                f"{self._count} earlier saves are still being written after {timeout_s:g} s",
                hint="save less often, or look at why the storage is slow",
            )
        if free.nbytes < nbytes:
            with contextlib.suppress(ValueError):
                self._regions.remove(free)
            free = _StagingMemory(nbytes)
            self._regions.append(free)
        return free

    def _choice(self) -> _StagingMemory | None:
        free = [region for region in self._regions if not region.lent]
        if free:
            return max(free, key=lambda region: region.nbytes)
        return _StagingMemory(0) if len(self._regions) < self._count else None


class _StagingMemory:
    """Private memory, populated before use; used by one copy at a time."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory: Any = b""
        self._borrower: weakref.ref[Any] | None = None
        if nbytes:
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, _POPULATE_WRITE):
                with contextlib.suppress(OSError):  # an older kernel: the copy touches the pages itself
                    self._memory.madvise(advice)

    @property
    def lent(self) -> bool:
        return self._borrower is not None and self._borrower() is not None

    def lend(self, told: Any) -> np.ndarray[Any, Any]:
        """All of the memory. `told()` runs on any thread when the last view of it is gone."""
        view = np.frombuffer(self._memory, np.uint8)
        self._borrower = weakref.ref(view, lambda _: told())
        return view


class _Places:
    """The place of each storage: one per storage, however many tensors share it."""

    def __init__(self) -> None:
        self.total = 0
        self._starts: dict[tuple[torch.device, int], tuple[int, torch.UntypedStorage]] = {}
        self._made: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if key not in self._starts:
            self._starts[key] = (self.total, storage)
            self.total += -(-storage.nbytes() // ALIGN) * ALIGN

    def copy_to(self, memory: np.ndarray[Any, Any], copier: Copier) -> None:
        """Copy all storages into `memory`."""
        base, moves = memory.ctypes.data, list[Move]()
        for key, (start, storage) in self._starts.items():
            if not (nbytes := storage.nbytes()):
                self._made[key] = torch.UntypedStorage(0)
                continue
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
            self._made[key] = flat.untyped_storage()
            if key[0].type == "cpu":
                moves.append((base + start, key[1], nbytes))
            else:
                flat.copy_(torch.empty(0, dtype=torch.uint8, device=key[0]).set_(storage))
        copier.copy(moves)

    def copied(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """The copy of `tensor`'s storage."""
        return self._made[tensor.device, tensor.untyped_storage().data_ptr()]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of dicts, lists and tuples that can be copied as bytes; all others are left to `deepcopy`."""
    pending: list[Any] = [tree]
    seen = set[int]()
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            if all(map(_is_plain, _parts(one))):
                yield one
        elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            pending.extend(one.values() if isinstance(one, dict) else one)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors inside a DTensor or another wrapper; the tensor itself if it is no wrapper."""
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        return (tensor,)
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
    )


def _rebuilt(tensor: torch.Tensor, places: _Places) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        inner = {name: _rebuilt(getattr(tensor, name), places) for name in names}
        unflatten: Any = type(tensor)
        return unflatten.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(places.copied(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_() if tensor.requires_grad else made
