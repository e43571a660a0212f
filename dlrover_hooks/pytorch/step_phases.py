"""Lets a `StepClock` see the forward and backward passes of a model, and on a GPU measure them there."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks.pytorch import collective_calls
from dlrover_hooks.pytorch.ddp_exactness import reduced
from dlrover_hooks.pytorch.tensor_loading import is_sharded
from dlrover_hooks.worker.step_clock import StepClock


class Removable(Protocol):
    """What `time_passes` has put into a model."""

    def remove(self) -> None:
        """Take it out again."""


def time_passes(clock: StepClock, model: nn.Module) -> list[Removable]:
    """Call the methods of `clock` for the passes of `model` in each training step, until what is returned is removed.
    If its parameters are on one GPU, `clock` then measures there.

    `model`: as the loop calls it, so with its wrapper. A hook for the end of the forward pass is put only into DDP and
    sharded models. A plain model may be copied or pickled, and the hook would be copied or pickled with it.
    """
    devices = {parameter.device for parameter in model.parameters()}
    on_gpu = len(devices) == 1 and all(device.type == "cuda" for device in devices)
    if on_gpu:
        clock.measure_on_device(CudaEvents(*devices))
    put: list[Removable] = []
    if isinstance(model, DistributedDataParallel) or any(is_sharded(one) for one in model.parameters()):
        put.append(model.register_forward_hook(after_forward(clock.forward_ended)))
    if isinstance(model, DistributedDataParallel) and (on_gpu or all(device.type == "cpu" for device in devices)):
        put.append(_TimedBroadcast(model, clock))
        if not _reduces_otherwise(model):
            put.append(_BackwardEnd(model, clock.backward_ended))
    return put


def after_forward(call: Callable[[], object]) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook that calls `call` where gradients will follow."""

    def ended(module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs, output
        if torch.compiler.is_compiling():  # the hook is traced with the model, and must not end its graph
            return
        if module.training and torch.is_grad_enabled():
            call()

    return ended


_clocks = weakref.WeakKeyDictionary[DistributedDataParallel, StepClock]()


class _TimedBroadcast:
    """DDP's broadcast of the model's buffers, at the beginning of a forward pass, is a wait for rank 0.

    The method of the class is wrapped, and acts on the models in `_clocks` only: what is put into a model itself would
    be in its copies, too.
    """

    def __init__(self, ddp: DistributedDataParallel, clock: StepClock) -> None:
        self._held = weakref.ref(ddp)
        _clocks[ddp] = clock
        original = DistributedDataParallel._sync_buffers
        if getattr(original, "timed", False):
            return

        @functools.wraps(original)
        def timed(self: DistributedDataParallel) -> None:
            if torch.compiler.is_compiling() or (clock := _clocks.get(self)) is None:
                return original(self)
            clock.waits()
            with collective_calls.of_ddp():
                original(self)
            clock.waited()

        cast(Any, timed).timed = True
        DistributedDataParallel._sync_buffers = timed

    def remove(self) -> None:
        """The broadcasts of this model are not timed any more."""
        if (found := self._held()) is not None:
            _clocks.pop(found, None)


def _reduces_otherwise(ddp: DistributedDataParallel) -> bool:
    """Whether the end of this rank's own backward pass says nothing of how long it waits for others: SyncBatchNorm
    waits within the passes, and gradients are not reduced as they become ready.
    """
    means = ("_use_python_reducer", "_delay_all_reduce_all_params", "mixed_precision")
    waits = any(isinstance(one, nn.SyncBatchNorm) for one in ddp.module.modules())
    return waits or any(getattr(ddp, name, None) for name in means)


class _BackwardEnd:
    """Calls `call` once in each backward pass that DDP synchronises, in the thread of that pass, when this rank's
    gradients are computed (on a GPU: queued).

    That is at the gradient which came last in the first such pass, where all are looked at. In a pass without this
    gradient `call` is not called.
    """

    def __init__(self, ddp: DistributedDataParallel, call: Callable[[], object]) -> None:
        self._ddp, self._call = weakref.ref(ddp), call
        self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in reduced(ddp).values()]
        self._ready = dict[int, None]()
        """Their numbers, in the order in which their gradients became ready."""
        self._handles = [
            node.register_prehook(functools.partial(self._first_pass, number))
            for number, node in enumerate(self._nodes)
        ]

    def _first_pass(self, number: int, _: Any) -> None:
        if not self._synchronised:
            return
        if number not in self._ready:
            self._ready[number] = None
            return
        (*_, last), nodes = self._ready, self._nodes  # another pass has begun
        self.remove()
        self._handles = [nodes[last].register_prehook(self._end)]
        if number == last:
            self._call()

    def _end(self, _: Any) -> None:
        if self._synchronised:
            self._call()

    @property
    def _synchronised(self) -> bool:
        """False within `no_sync`."""
        found = self._ddp()
        return found is not None and found.require_forward_param_sync

    def remove(self) -> None:
        """`call` is not called any more."""
        while self._handles:
            self._handles.pop().remove()
        self._nodes = []


class CudaEvents:
    """Events in the current stream of a GPU: the `DeviceEvents` of a `StepClock`. They are used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._spare = device, deque[Any]()

    def record(self) -> Any | None:
        if torch.cuda.is_current_stream_capturing():  # it would become a part of the graph
            return None
        event = self._spare.popleft() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: Any) -> bool:
        return mark.query()

    def seconds(self, earlier: Any, later: Any) -> float:
        return earlier.elapsed_time(later) / 1e3

    def release(self, marks: Iterable[Any]) -> None:
        self._spare.extend(marks)
