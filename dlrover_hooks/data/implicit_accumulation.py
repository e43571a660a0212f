"""Gradient accumulation for a loop that has none: backward, then `optimizer.step()`, after each batch.

At another world size a step may take several micro-batches on this rank. `Accumulation` then makes such a loop correct:

- `optimizer.step()` does nothing until the step's last micro-batch;
- gradients of the earlier micro-batches are taken out of `parameter.grad`, weighted, and put back when the backward of
  the last one begins. So `zero_grad` loses nothing, however it is called, and clipping is applied to the full gradient;
- objects passed to `hold` (schedulers, GradScaler, averaged models) act only where the step ends.

A loop that cannot be made correct this way gets a UsageError before any weight is changed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from dlrover_hooks.data.batch_plan import BatchPlan
from dlrover_hooks.errors import UsageError

if TYPE_CHECKING:
    from dlrover_hooks.data.loader import ElasticLoader

_ATTRIBUTE = "_dlrover_hooks_accumulation"
_MANUAL = (
    'or accumulate in the loop itself: elastic_loader(..., accumulation="manual"), then `(loss * loader.loss_scale / '
    "loader.sampler.plan.micro_batches).backward()` (times loader.weight without DistributedDataParallel), and "
    "`if loader.step_ends: optimizer.step(); optimizer.zero_grad()`"
)


def leader(loaders: Sequence[Any]) -> Any:
    """Of loaders that step together, the one whose `weight`, `loss_scale` and `step_ends` are those of the step.

    A step has one weight per rank, since the losses of all loaders are one sum. In full steps all loaders agree; a
    loader that ends its epoch with a short step determines the weight. Otherwise it is the first that is not over. None
    if there is none.
    """
    if len(loaders) < 2:
        return loaders[0] if loaders else None
    live = [one for one in loaders if one.live] or loaders
    return next((one for one in live if _is_short(one)), live[0])


def _is_short(loader: Any) -> bool:
    return loader.sampler.step.samples < loader.sampler.plan.global_batch_size


def accumulation_of(optimizer: Optimizer) -> Accumulation:
    """The optimizer's `Accumulation`: all loaders that step it share it."""
    if not hasattr(optimizer, _ATTRIBUTE):
        made = Accumulation()
        made.add_optimizer(optimizer)
    return getattr(optimizer, _ATTRIBUTE)


class Accumulation:
    """The micro-batches of one optimizer step on this rank, for a loop that steps after each. Training thread."""

    def __init__(self) -> None:
        self.ends = True
        """The micro-batch last received is the last one of its step; also true outside of the loop."""
        self.needs_extra = False
        """Schedulers must be passed to `hold`: the caller has announced that it will pass them on."""
        self._reduction: str | None = None
        self._loaders: list[weakref.ref[ElasticLoader]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._held: dict[torch.Tensor, torch.Tensor] = {}
        """Gradients of the step's micro-batches so far, weighted."""
        self._hooks: list[RemovableHandle] = []
        self._nodes: list[Any] = []
        self._known: BatchPlan | None = None
        self.active, self._factor, self._number = False, 1.0, 1
        self._calls: dict[int, int] = {}
        self._rates: dict[int, list[float]] = {}
        self._scheduled = weakref.WeakSet[Optimizer]()
        self._arrived = self._called = False

    # ---- participants -----------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Suppress its `step` until the step ends. The optimizer keeps this object alive, not vice versa."""
        if any(ref() is optimizer for ref in self._optimizers):
            return
        self._optimizers.append(weakref.ref(optimizer))
        setattr(optimizer, _ATTRIBUTE, self)
        _wrap(optimizer, "step", self._step)
        _wrap(optimizer, "zero_grad", self._zero_grad)

    def add_loader(self, loader: ElasticLoader) -> None:
        """Its micro-batches are counted for the step."""
        self._loaders.append(weakref.ref(loader))
        self._known = None

    def remove_loader(self, loader: ElasticLoader) -> None:
        """Remove a loader. Without a loader, no step is suppressed."""
        self.over()
        self._loaders = [ref for ref in self._loaders if ref() is not loader]

    def reduced(self, *, weighed: bool) -> None:
        """Ranks' gradients are reduced once per step: summed with the loader's weights (`weighed`), or averaged."""
        self._reduction, self._known = "weighed" if weighed else "averaged", None

    def hold(self, part: Any) -> None:
        """Let a scheduler, a GradScaler or an averaged model act only where a step ends. Ignores other objects."""
        if isinstance(part, LRScheduler):
            self._scheduled.add(part.optimizer)
            hold_back(part, ("step",), self)
        elif isinstance(part, AveragedModel):
            hold_back(part, ("update_parameters",), self)
        elif isinstance(part, GradScaler):
            hold_back(part, ("update",), self)
            _hold_back_scaler(part, self)

    # ---- called by the loader ---------------------------------------------------------------------------------------

    def received(self, loader: ElasticLoader) -> None:
        """The loop is about to receive a micro-batch."""
        plan = loader.sampler.progress.plan
        if plan is self._known:  # a step is one micro-batch, and weights are applied elsewhere
            return
        loaders = [one for ref in self._loaders if (one := ref()) is not None]
        if all(one.sampler.plan.micro_batches == 1 for one in loaders) and self._reduction != "averaged":
            if self.active:
                self.over()
            self._known = plan if len(loaders) == 1 else None
            return
        self._known = None
        self._begin(leader(loaders))

    def _begin(self, lead: ElasticLoader) -> None:
        plan, number = lead.sampler.plan, lead.sampler.progress.current()[1]
        if number == 1:
            self._refuse_unfinished(lead)
        self.ends, self._number, self._arrived, self._called = lead.step_ends, number, False, False
        weight = 1.0 if self._reduction == "weighed" else lead.weight * plan.world_size
        self._factor = lead.loss_scale * weight / plan.micro_batches
        self.active = not self.ends or number > 1 or self._factor != 1.0
        if self.active and not self._hooks:
            self._install()

    def _refuse_unfinished(self, lead: ElasticLoader) -> None:
        left, self._held, self._calls, self._rates = self._held, {}, {}, {}
        if left:
            raise UsageError(
                f"loader {lead.name!r}: optimizer.step() was called after earlier micro-batches of a step, not after "
                "its last one",
                hint="call optimizer.step() after each batch, " + _MANUAL,
            )

    def requested(self) -> None:
        """The loop requests the next micro-batch. UsageError if the loop accumulates itself."""
        if self._arrived and not self._called:
            self._arrived = False
            raise UsageError(
                f"optimizer.step() was not called after micro-batch {self._number} of a step of several: this loop "
                "accumulates by itself, and its gradients would be weighted twice",
                hint="call optimizer.step() and zero_grad() after each batch and do not divide the loss (the loader "
                "holds them back until the step is whole), " + _MANUAL,
            )

    def over(self) -> None:
        """The iteration ended. Gradients of an interrupted step are discarded."""
        self.ends, self.active, self._arrived, self._known = True, False, False, None
        self._held, self._calls, self._rates = {}, {}, {}
        while self._hooks:
            self._hooks.pop().remove()
        self._nodes.clear()

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        me: weakref.ref[Accumulation] = weakref.ref(
            self
        )  # the hooks are in C++: a cycle through them would never be collected
        for ref in self._optimizers:
            for parameter in _parameters(ref()):
                if parameter.requires_grad:
                    node = torch.autograd.graph.get_gradient_edge(parameter).node
                    self._nodes.append(node)
                    self._hooks.append(node.register_prehook(functools.partial(_incoming, me, parameter)))
                    after: Any = cast(Any, parameter).register_post_accumulate_grad_hook
                    self._hooks.append(after(functools.partial(_arrived, me)))

    def incoming(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Weight a gradient on its way into `parameter.grad`. In the last micro-batch, put the earlier ones back."""
        if self.ends:
            self._put_back(parameter)
        return _times(grad, self._factor)

    def arrived(self, parameter: torch.Tensor) -> None:
        """The gradient is in `parameter.grad`: take it out unless the step ends."""
        if self._called and not self.ends:
            raise UsageError(
                f"a backward after step() in micro-batch {self._number} of a step of several: its loss is computed "
                "with weights that the whole step would have changed before",
                hint="call backward for all losses first and step() of all optimizers then; or choose batch_size and "
                "global_batch_size so that each worker has one micro-batch in a step",
            )
        self._arrived = True
        if not self.ends:
            self._take(parameter)

    def _take(self, parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            self._held[parameter] = grad if (before := self._held.get(parameter)) is None else before + grad

    def _put_back(self, parameter: torch.Tensor) -> None:
        if (before := self._held.pop(parameter, None)) is not None:
            parameter.grad = before if parameter.grad is None else parameter.grad + before

    # ---- called by the loop -----------------------------------------------------------------------------------------

    def _step(self, plain: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return plain(optimizer, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if not self.ends:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.keep(optimizer)
            return loss
        if closure is None:
            self._settle(optimizer)
            return plain(optimizer, *args, **kwargs)
        once = self._once(optimizer, closure)
        return plain(optimizer, once, *args[1:]) if args else plain(optimizer, **kwargs | {"closure": once})

    def _once(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        called: list[None] = []

        def once() -> Any:
            if called:
                raise UsageError(
                    f"{type(optimizer).__name__} evaluates its closure more than once in a step, and this step has "
                    f"{self._number} micro-batches, of which it would see the last one only",
                    hint="give global_batch_size and batch_size so that each worker has one micro-batch in a step",
                )
            called.append(None)
            loss = closure()
            self._settle(optimizer)
            return loss

        return once

    def keep(self, optimizer: Optimizer) -> None:
        """`step()` was called before the step ends: take the present gradients out."""
        self._check(optimizer)
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:  # not set by a backward, or of a frozen parameter
                parameter.grad = _times(parameter.grad, self._factor)
                self._take(parameter)

    def _settle(self, optimizer: Optimizer) -> None:
        self._check(optimizer)
        self.complete(optimizer)
        self.stepped(optimizer)

    def complete(self, optimizer: Optimizer) -> None:
        """The step ends: also put back gradients of parameters that had none in the last micro-batch."""
        for parameter in _parameters(optimizer) if self.active else ():
            if parameter not in self._held:
                continue
            if self._reduction is not None and self._world > 1:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} had a gradient in earlier micro-batches of a step "
                    "and none in the last one, where DistributedDataParallel reduces them",
                    hint="use all parameters in each forward, or give batch_size and global_batch_size so that each "
                    "worker has one micro-batch in a step",
                )
            if parameter.grad is not None:
                parameter.grad = _times(parameter.grad, self._factor)
            self._put_back(parameter)

    def stepped(self, optimizer: Optimizer) -> None:
        """The step was made or skipped (GradScaler): discard its gradients."""
        self._called = True
        for parameter in _parameters(optimizer):
            self._held.pop(parameter, None)

    def _zero_grad(self, plain: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if self.active and self._arrived and not self._called:
            raise UsageError(
                "zero_grad() between a backward and the step() that it is for, in a step of several micro-batches",
                hint="call zero_grad() ahead of the first backward, or behind step()",
            )
        plain(optimizer, *args, **kwargs)

    def _check(self, optimizer: Optimizer) -> None:
        """Refuse loops for which one step over several micro-batches would be wrong."""
        key = self._index(optimizer)
        self._called = True
        if self._reduction is None and self._world > 1:
            raise UsageError(
                f"a step has several micro-batches on a rank of {self._world}, and gradients are never reduced in it",
                hint="make AsyncCheckpointer(model=DistributedDataParallel(model), ...) before the loop, " + _MANUAL,
            )
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls != self._number:
            raise UsageError(
                f"step() of {type(optimizer).__name__} was called {calls} times in {self._number} micro-batches of a "
                "step: it must be once after each, since the loader makes one step of all",
                hint="call optimizer.step() once after each batch, " + _MANUAL,
            )
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if self._rates.setdefault(key, rates) != rates:
            raise UsageError(
                f"the learning rate changed from {self._rates[key]} to {rates} between the micro-batches of one step",
                hint="give the scheduler to AsyncCheckpointer(..., extra=[scheduler]), which steps it where a step "
                "ends; or write `if loader.step_ends: scheduler.step()`, and compute a rate of your own from "
                "`checkpointer.step`, which counts steps",
            )
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched") and optimizer not in self._scheduled
        if self.needs_extra and scheduled:
            raise UsageError(
                f"a scheduler of {type(optimizer).__name__} is not known here: stepped once for each micro-batch it "
                "would be ahead, and after a restart it would begin at its start",
                hint="AsyncCheckpointer(..., extra=[scheduler])",
            )

    def _index(self, optimizer: Optimizer) -> int:
        return next((number for number, ref in enumerate(self._optimizers) if ref() is optimizer), -1)

    @property
    def _world(self) -> int:
        return max((one.sampler.plan.world_size for ref in self._loaders if (one := ref()) is not None), default=1)


def _incoming(window: weakref.ref[Accumulation], parameter: torch.Tensor, grads: Any) -> Any:
    found = window()
    if found is None or not found.active or grads[0] is None:
        return None
    return (found.incoming(parameter, grads[0]),)


def _arrived(window: weakref.ref[Accumulation], parameter: torch.Tensor) -> None:
    if (found := window()) is not None and found.active:
        found.arrived(parameter)


def _times(grad: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return grad
    return grad * factor if factor else torch.zeros_like(grad)  # removes NaN and inf of a sample with weight 0


def _parameters(optimizer: Optimizer | None) -> list[torch.Tensor]:
    return [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]


def _wrap(optimizer: Optimizer, name: str, act: Callable[..., Any]) -> None:
    """Replace a method by `act(plain, optimizer, ...)`, without a reference cycle. Schedulers, which wrap
    `step.__func__`, may be created before or after it.
    """
    now = getattr(optimizer, name)
    plain = now.__func__ if hasattr(now, "__func__") else _unbound(now)
    ref = weakref.ref(optimizer)

    @functools.wraps(plain)
    def method(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return act(plain, optimizer, *args, **kwargs)

    @functools.wraps(now)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return act(plain, ref(), *args, **kwargs)

    vars(bound)["__func__"] = method
    setattr(optimizer, name, bound)


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a method that a scheduler has put on the instance, already bound to its optimizer."""

    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def hold_back(part: Any, names: Sequence[str], window: Any) -> None:
    """Suppress methods of `part` unless `window.ends`. Done by its class: all attributes of a scheduler are state."""
    kind = cast(Any, type(part))
    _as_subclass(part, {name: _where_a_step_ends(getattr(kind, name), window) for name in names})


def _where_a_step_ends(act: Callable[..., Any], window: Any) -> Callable[..., Any]:
    @functools.wraps(act)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return act(self, *args, **kwargs) if window.ends else None

    return method


def _hold_back_scaler(scaler: GradScaler, window: Accumulation) -> None:
    kind = type(scaler)

    def unscale_(self: GradScaler, optimizer: Optimizer) -> None:
        if window.ends:
            window.complete(optimizer)
            kind.unscale_(self, optimizer)

    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not window.ends:
            return window.keep(optimizer)
        window.complete(optimizer)
        result = kind.step(self, optimizer, *args, **kwargs)
        window.stepped(optimizer)  # `step` is not called if a gradient is infinite
        return result

    _as_subclass(scaler, {"unscale_": unscale_, "step": step})


def _as_subclass(part: Any, methods: dict[str, Any]) -> None:
    kind = cast(Any, type(part))
    part.__class__ = type(kind.__name__, (kind,), methods | {"__module__": kind.__module__})
