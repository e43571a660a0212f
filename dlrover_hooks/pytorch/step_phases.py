"""Lets a `StepClock` see the forward and backward passes of a model, and on a GPU measure them there."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dlrover_hooks.pytorch.ddp_exactness import never_rebuilds, reduced
from dlrover_hooks.pytorch.tensor_loading import is_sharded
from dlrover_hooks.worker.step_clock import StepClock


def time_passes(clock: StepClock, model: nn.Module) -> list[RemovableHandle]:
    """Call `forward_ended` and `backward_ended` of `clock` in each training step of `model`, until the handles are
    removed. If its parameters are on one GPU, `clock` then measures there.

    `model`: as the loop calls it, so with its wrapper. The end of the forward pass is seen of DDP and of sharded models
    only: a hook in a plain model would be part of it where it is copied, or saved as a whole.
    """
    ddp = isinstance(model, DistributedDataParallel)
    devices = {parameter.device for parameter in model.parameters()}
    on_gpu = len(devices) == 1 and all(device.type == "cuda" for device in devices)
    if on_gpu:
        clock.measure_on_device(CudaEvents(*devices))
    handles: list[RemovableHandle] = []
    if ddp or any(is_sharded(parameter) for parameter in model.parameters()):
        handles.append(model.register_forward_hook(after_forward(clock.forward_ended)))
    if isinstance(model, DistributedDataParallel) and (on_gpu or all(device.type == "cpu" for device in devices)):
        ended = _on_backward_end(model, clock.backward_ended)
        handles += [ended] if ended is not None else []
    return handles


def after_forward(call: Callable[[], object]) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook that calls `call` where gradients will follow."""

    def ended(module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs, output
        if torch.compiler.is_compiling():  # the hook is traced with the model, and must not end its graph
            return
        if module.training and torch.is_grad_enabled():
            call()

    return ended


def _on_backward_end(ddp: DistributedDataParallel, call: Callable[[], object]) -> RemovableHandle | None:
    """Call `call` in each synchronised backward, in its thread, when this rank's own work in it is done, or queued.

    That is at the first parameter's gradient, which as a rule is the last one. None where the time up to there would
    say nothing of this rank's own work: the forward pass waits for other ranks, too (buffers that DDP keeps equal, or
    SyncBatchNorm), or that parameter may have no gradient.
    """
    waits = ddp.broadcast_buffers and any(True for _ in ddp.module.buffers())
    waits = waits or any(isinstance(one, nn.SyncBatchNorm) for one in ddp.module.modules())
    if waits or never_rebuilds(ddp):
        return None
    held = weakref.ref(ddp)

    def ended(_: Any) -> None:
        found = held()
        if found is not None and found.require_forward_param_sync:  # not within `no_sync`
            call()

    node = torch.autograd.graph.get_gradient_edge(next(iter(reduced(ddp).values()))).node
    return cast(RemovableHandle, node.register_prehook(ended))


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
