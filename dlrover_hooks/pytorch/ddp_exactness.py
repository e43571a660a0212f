"""Exact training with DistributedDataParallel: weighted gradients, and the same buckets after a restart.

Both act only where they are safe, and report the reason where they do not (`DdpOutcome`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

import dlrover_hooks.elastic.gloo_exit_wait  # noqa: F401  # the hook's callbacks are freed before the process ends
from dlrover_hooks.errors import UsageError
from dlrover_hooks.worker import surviving_process

log = logging.getLogger(__name__)


class DdpOutcome(NamedTuple):
    """Whether it was done, and if not, why. True when done."""

    done: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.done


def weigh_gradients(ddp: DistributedDataParallel, weight: Callable[[], float]) -> DdpOutcome:
    """Make each all-reduce a SUM of `weight()` times this rank's gradient (`ElasticSampler.weight`).

    DDP divides by the world size, as if all ranks had computed equally much. With uneven micro-batches or a short last
    step that is wrong: at N = 5 micro-batches the relative error was 0.28 (W = 2) and 0.38 (W = 3). With these weights
    the gradient is exact to 2e-16, and the loss code stays unchanged. A weight of 0 zeroes the gradient, NaN and inf
    included.

    A communication hook applies the weight and costs 0.1 ms or more per step. So it is registered before the first
    forward whose weight is not 1 / W; until then DDP's own all-reduce gives the same bits. Ranks need not register it
    at the same step.

    Every rank must call it, before the first backward. `weight` runs in the autograd thread, once per bucket. Not done
    when a communication hook is registered already (DDP takes one): then multiply the loss by W * weight instead.

    Under `elastic_run` each synchronised backward also calls `membership.binds`, before its last all-reduce.
    """
    if ddp._comm_hooks:
        return DdpOutcome(False, f"DDP already has the communication hook {_hook_names(ddp)}; it takes one only")
    _WEIGHED.add(ddp)
    world = dist.get_world_size(ddp.process_group)
    told = surviving_process.current() is None or _tell_ahead(ddp, world)
    if not told or ddp.gradient_as_bucket_view:  # DDP divides a view afterwards, which rounds differently
        ddp.register_comm_hook(None, _weighted_sum(ddp.process_group, weight, told=told))
        return DdpOutcome(True)
    even = 1 / world

    def before_forward(module: Any, _: Any) -> None:
        if weight() == even and not module._comm_hooks:
            return
        handle.remove()
        if module._comm_hooks:
            raise UsageError(
                f"DDP was given the communication hook {_hook_names(module)} behind the elastic loader's: it takes one",
                hint="register it before the loader and the checkpointer are made: losses are weighed then",
            )
        module.register_comm_hook(None, _weighted_sum(module.process_group, weight))

    handle = ddp.register_forward_pre_hook(before_forward)
    return DdpOutcome(True)


_WEIGHED = weakref.WeakSet[DistributedDataParallel]()


def _tell_ahead(ddp: DistributedDataParallel, world: int) -> bool:
    """Call `membership.binds` at the first parameter's gradient. Returns False if a parameter may have no gradient.

    DDP needs that gradient for its last bucket, so no peer can complete the step before.
    """
    if never_rebuilds(ddp):
        return False
    first = next(iter(reduced(ddp).values()))
    node = torch.autograd.graph.get_gradient_edge(first).node  # DDP keeps it alive
    held = weakref.ref(ddp)

    def ahead(_: Any) -> None:
        found = held()
        if found is not None and found.require_forward_param_sync:  # not within `no_sync`
            surviving_process.binds(world)

    node.register_prehook(ahead)
    return True


def _weighted_sum(group: Any, weight: Callable[[], float], *, told: bool = True) -> Callable[..., Any]:
    """The communication hook. `told`: `membership.binds` is called elsewhere."""
    world, options = dist.get_world_size(group), dist.AllreduceOptions()
    options.asyncOp = True

    def weighted_sum(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, w = bucket.buffer(), weight()
        buffer.mul_(w) if w else buffer.zero_()
        if not told and bucket.is_last():  # after this bucket the other ranks can complete the step without this one
            surviving_process.binds(world)
        return group.allreduce([buffer], options).get_future().then(_first)

    # DDP compares annotations with classes, but postponed evaluation has made them strings
    weighted_sum.__annotations__ = {}
    weighted_sum.harmless_on_zeros = True  # pyright: ignore[reportFunctionMemberAccess]
    return weighted_sum


def _first(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return reduced.value()[0]


def weighs(model: nn.Module) -> bool:
    """True if `model` is a DDP whose gradients `weigh_gradients` weights."""
    return isinstance(model, DistributedDataParallel) and model in _WEIGHED


class SyncAtEnds:
    """Makes DDP reduce gradients only where a step ends, as `no_sync` around the other micro-batches would.

    Without it, ranks with different shares of a step would hang, because each backward is a collective. The loop's own
    `no_sync` still works. `close` undoes the change. Training thread only.
    """

    def __init__(self, ddp: DistributedDataParallel, step_ends: Callable[[], bool]) -> None:
        self._step_ends, self._held = step_ends, False
        self._ddp = weakref.ref(ddp)  # a cycle through the hook would keep DDP's threads alive past the process group
        self._handle = ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, ddp: Any, _: Any) -> None:
        if self._step_ends():
            if self._held:
                self._release(ddp)
        elif ddp.require_backward_grad_sync:
            ddp.require_backward_grad_sync, self._held = False, True

    def _release(self, ddp: Any) -> None:
        if self._held:
            ddp.require_backward_grad_sync, self._held = True, False

    def close(self) -> None:
        """Restore DDP's own behavior."""
        self._handle.remove()
        if (ddp := self._ddp()) is not None:
            self._release(ddp)


class BucketOrder:
    """Makes a restarted run sum its gradients in the order of an uninterrupted one (bit-equality at W >= 3).

    DDP puts gradients into buckets in reverse parameter order for its first synchronised backward. For all later ones
    it uses the order in which they became ready in the first. The order of summation depends on the position in the
    bucket, so a restarted run would differ in its first step. `record` keeps that order as parameter names, to be
    stored in the checkpoint. After a restart `replay` passes zero gradients to DDP in the same order, so that the next
    forward builds the same buckets. No user code runs, no random number is drawn, no buffer or gradient is changed.

    Relies on private parts of torch's reducer (tested with torch 2.13): where they are missing, `replay` is not done.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.names: tuple[str, ...] = ()
        self._ready: list[str] = []
        self._handles: list[RemovableHandle] = []

    def record(self) -> DdpOutcome:
        """Record the order of the first synchronised backward into `names`, once; its hooks then remove themselves."""
        reason = never_rebuilds(self.ddp)
        if not reason and self.ddp._has_rebuilt_buckets:
            reason = "the first synchronised backward is over"
        if reason:
            return DdpOutcome(False, reason)
        self.close()
        parameters = reduced(self.ddp)
        for name, parameter in parameters.items():
            hook = self._noter(name, len(parameters))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return DdpOutcome(True)

    def _noter(self, name: str, count: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            if not self.ddp.require_backward_grad_sync:
                return
            self._ready.append(name)
            if len(self._ready) == count:
                self.names = tuple(self._ready)
                self.close()

        return note

    def replay(self, names: Sequence[str]) -> DdpOutcome:
        """Replay the recorded order to DDP. Collective.

        Every rank calls it, before the first forward and after the model was restored. Costs one backward of zeros and
        its all-reduce. Not done, without harm, below W = 3, where order does not matter, and where DDP or hooks on
        parameters would notice the zeros.
        """
        self.names = tuple(names)
        reason = never_rebuilds(self.ddp) or self._unfit() or _would_notice(self.ddp)
        if reason:
            return DdpOutcome(False, reason)
        self.close()
        parameters = reduced(self.ddp)
        kept = {name: p.grad for name, p in parameters.items()}
        try:
            self._backward([parameters[name] for name in self.names])
        finally:
            for name, grad in kept.items():
                parameters[name].grad = grad
        return DdpOutcome(True)

    def _unfit(self) -> str:
        if dist.get_world_size(self.ddp.process_group) < 3:
            return "with fewer than 3 ranks the order of summation does not matter"
        if self.ddp._has_rebuilt_buckets:
            return "DDP has built its final buckets already"
        if sorted(self.names) != sorted(reduced(self.ddp)):
            return "the recorded parameters are not those of this model"
        return ""

    def _backward(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """One synchronised backward, a parameter at a time. Skips DDP's forward, because that syncs buffers."""
        reducer: Any = self.ddp.reducer
        if not self.ddp._lazy_init_ran:
            self.ddp._lazy_init()
        with torch.enable_grad():
            for parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([])
            for parameter in parameters:
                zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)
                torch.autograd.backward([parameter.view_as(parameter)], [zero])

    def close(self) -> None:
        """Stop recording and discard a partial record. `names` stays."""
        while self._handles:
            self._handles.pop().remove()
        self._ready.clear()


def reduced(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients DDP reduces, by name."""
    named: Iterator[tuple[str, torch.nn.Parameter]] = ddp.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore}


def _hook_names(ddp: DistributedDataParallel) -> str:
    return ", ".join(getattr(hook, "__qualname__", str(hook)) for hook, _ in ddp._comm_hooks)


def never_rebuilds(ddp: DistributedDataParallel) -> str:
    """Why this DDP keeps its first buckets or orders them differently; empty if it rebuilds them."""
    missing = [
        n for n in ("_has_rebuilt_buckets", "_lazy_init_ran", "require_backward_grad_sync") if not hasattr(ddp, n)
    ]
    if missing or not hasattr(ddp.reducer, "prepare_for_backward"):
        return f"this torch ({torch.__version__}) has another DDP inside: {', '.join(missing) or 'reducer'} missing"
    if ddp.static_graph:
        return "static_graph=True reduces its first backward by other means: not supported"
    if ddp.find_unused_parameters:
        return "find_unused_parameters=True never rebuilds buckets: the order is the same after a restart"
    if ddp._use_python_reducer or ddp._delay_all_reduce_all_params or ddp.mixed_precision is not None:
        return "the compiled reducer, delayed all-reduce and DDP's mixed precision do not rebuild buckets this way"
    return ""


def _would_notice(ddp: DistributedDataParallel) -> str:
    """Why zero gradients outside a training step would have side effects; empty if they have none."""
    if any(not getattr(hook, "harmless_on_zeros", False) for hook, _ in ddp._comm_hooks):
        return f"the communication hook {_hook_names(ddp)} may keep state of what it reduces"
    if any(getattr(module, "sparse", False) is True for module in ddp.module.modules()):
        return "the model has sparse gradients"
    for name, p in reduced(ddp).items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return f"parameter {name!r} has gradient hooks of its own"
    return ""
