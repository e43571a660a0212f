"""Lets a `StepClock` see the forward and backward passes of a model, and on a GPU measure them there."""

from __future__ import annotations

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

    `model`: as the loop calls it, so with its wrapper. The end of the forward pass is seen of DDP and of sharded models
    only: a hook in a plain model would be part of it where it is copied, or saved as a whole.
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
        ended = _on_backward_end(model, clock.backward_ended)
        put += [ended] if ended is not None else []
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


class _TimedBroadcast:
    """DDP's broadcast of the model's buffers, at the beginning of a forward pass, is a wait for rank 0."""

    def __init__(self, ddp: DistributedDataParallel, clock: StepClock) -> None:
        self._held = held = weakref.ref(ddp)

        def timed() -> None:
            found = held()
            assert found is not None
            if torch.compiler.is_compiling():  # traced with the model
                return type(found)._sync_buffers(found)
            clock.waits()
            with collective_calls.of_ddp():
                type(found)._sync_buffers(found)
            clock.waited()

        cast(Any, ddp)._sync_buffers = timed

    def remove(self) -> None:
        """DDP's own method is in its place again."""
        if (found := self._held()) is not None:
            vars(found).pop("_sync_buffers", None)


def _on_backward_end(ddp: DistributedDataParallel, call: Callable[[], object]) -> Removable | None:
    """Call `call` in each synchronised backward, in its thread, when this rank's own work in it is done, or queued.

    That is at the first parameter's gradient, which as a rule is the last one. It is not called in a step in which that
    parameter has no gradient. None where the time up to there would say nothing of this rank's own work, as its forward
    pass waits for other ranks (SyncBatchNorm), and where DDP reduces gradients by other means.
    """
    waits = any(isinstance(one, nn.SyncBatchNorm) for one in ddp.module.modules())
    if waits or ddp._use_python_reducer or ddp._delay_all_reduce_all_params or ddp.mixed_precision is not None:
        return None
    held = weakref.ref(ddp)

    def ended(_: Any) -> None:
        found = held()
        if found is not None and found.require_forward_param_sync:  # not within `no_sync`
            call()

    node = torch.autograd.graph.get_gradient_edge(next(iter(reduced(ddp).values()))).node
    return cast(Removable, node.register_prehook(ended))


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
