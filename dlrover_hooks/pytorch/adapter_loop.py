"""Drives a hand-written loop in a job, for frameworks that prepare their objects one by one: Accelerate, Fabric, and
Transformers, whose loop is taken for one.

`TrainingLoop` keeps the parts of one consistent cut, restores each part when it is added, and cuts at step boundaries.
`Window` determines, for each micro-batch, whether its step ends with it and the factor for its loss.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.state import pytree
from dlrover_hooks.config import Config, Place
from dlrover_hooks.data.leased.leased_loader import LeasedLoader, is_leased as is_leased
from dlrover_hooks.data.loader import ElasticLoader, elastic_loader
from dlrover_hooks.elastic.adapter_recovery import AdapterRecovery
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.restored_value_check import listed, own_state, require
from dlrover_hooks.pytorch.async_checkpointer import keep_buckets
from dlrover_hooks.pytorch.ddp_exactness import BucketOrder, weigh_gradients
from dlrover_hooks.pytorch.even_batches import leader
from dlrover_hooks.pytorch.extra_state import Stateful
from dlrover_hooks.pytorch.loader_kinds import is_training as is_training, keeps_own_state as keeps_own_state
from dlrover_hooks.pytorch.state_dict import OptimizerForm, exact_optimizer_states, refuse_other_class
from dlrover_hooks.pytorch.step_phases import time_passes
from dlrover_hooks.pytorch.tensor_loading import refuse_sharded
from dlrover_hooks.session import Preempted, Restored
from dlrover_hooks.step_driver import StepDriver

log = logging.getLogger("dlrover_hooks")


class StatefulLoader(Stateful, Protocol):
    """A training loader that keeps its own position (torchdata, litdata, streaming): kept in the cut, never wrapped."""

    def __iter__(self) -> Iterator[Any]: ...


class Window:
    """The loop's accumulation window, as long as this rank's share of the step.

    Without an elastic loader, and with leased data, every micro-batch is a step. Training thread only.
    """

    def __init__(self) -> None:
        self.loaders: list[ElasticLoader | LeasedLoader] = []
        """These step together; the first one's epochs are those of the loop."""
        self.pending = False
        """True from a micro-batch's backward to the end of its step: gradients must not be zeroed."""
        self.hooked = False
        """True when a communication hook weights the gradients."""
        self.averages = False
        """True if the loop weights its losses, so that gradients are averaged over the ranks, as DDP does it."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self._inside = False
        self._models: list[DistributedDataParallel] = []

    def follow(self, model: DistributedDataParallel) -> None:
        """Weight the model's gradients, and reduce them once per window."""
        weighed = weigh_gradients(model, self._weight)
        self.hooked = bool(weighed) and (self.hooked or not self._models)
        if not weighed:
            log.info("losses are weighted instead of gradients: %s", weighed.reason)
        self._models.append(model)

    @property
    def loader(self) -> ElasticLoader | LeasedLoader | None:
        """The loader whose weights apply to the step: see `even_batches.leader`."""
        return leader(self.loaders)

    @property
    def micro_batches(self) -> int:
        """This rank's micro-batches in a full step."""
        first = self.loaders[0] if self.loaders else None
        return first.sampler.plan.micro_batches if isinstance(first, ElasticLoader) else 1

    @property
    def number(self) -> int:
        """Index of the micro-batch last received in its step, from 1."""
        return self.loader.sampler.progress.current()[1] if isinstance(self.loader, ElasticLoader) else 1

    @property
    def ends(self) -> bool:
        """True if the micro-batch last received is this rank's last in its step; true outside the loop, too."""
        return self.loader is None or not self._inside or self.loader.step_ends

    def scale(self) -> float:
        """Factor for the loss of the micro-batch last received, besides the division by `micro_batches`."""
        if self.loader is None:
            return 1.0
        return self.loader.loss_scale * (1.0 if self.hooked else self.loader.weight * _world_size())

    def received(self) -> None:
        """Called before a micro-batch is given to the loop: sets whether DDP reduces gradients."""
        self._inside = True
        for model in self._models:
            model.require_backward_grad_sync = self.ends

    def over(self) -> None:
        """Called when the loop over the loader ends. Discards the gradients of an interrupted window."""
        for optimizer in self.optimizers if self.pending else ():
            optimizer.zero_grad()
        self._inside = self.pending = False
        for model in self._models:
            model.require_backward_grad_sync = True

    def forget(self) -> None:
        """Drop references when the loop is over: DDP holds the window in C++, where gc finds no cycle."""
        self._models.clear()
        self.optimizers.clear()

    def may_zero(self) -> bool:
        """True if gradients may be zeroed: not inside a window, at whatever point the loop calls `zero_grad`."""
        return self.micro_batches == 1 or not self.pending

    def _weight(self) -> float:
        if self.loader is not None and not self.averages:
            return self.loader.weight
        return 1.0 / _world_size()


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class TrainingLoop:
    """One worker's part in one round, for a loop of the user's own.

    The constructor joins the job and finds what to restore. Each part added later is restored in that call, by its
    order within its kind. The first optimizer's steps count. All methods run on the training thread.

    Raises:
        UsageError: parts of the restored checkpoint were not added (at the first step boundary).
    """

    def __init__(self, config: Config, place: Place, on_preempt: Callable[[Preempted], object] | None = None) -> None:
        self.config, self.place, self.window = config, place, Window()
        self._driver = StepDriver(self, config, place, on_preempt=on_preempt)
        self.session = self._driver.session
        restored = self._driver.start(check=_check_state)
        try:
            self._saved = _taken(restored)
        except UsageError:
            self._driver.close(p.Departure.FAILED)
            raise
        self.step: int = self._saved.get("step", 0)
        self.first_world: int = self._saved.get("first_world", place.world_size)
        """The world size of the job's first start, which schedules were made for."""
        self._epoch: int = self._saved.get("epoch", 0)
        self.left_out = ""
        """Why a loader was treated as an evaluation loader. Logged at the first step if there is no other loader."""
        self._parts: dict[str, list[Stateful]] = {}
        self._buckets: list[BucketOrder] = []
        self._own: list[dict[str, Any]] = []
        self._epoch_over: bool = self._saved.get("epoch_over", False)
        self._undo: list[Callable[[], None]] = []
        self._forward_hooks: list[RemovableHandle] = []
        """Of the models, until there is an elastic loader: a model with one takes a slower path in PyTorch."""
        self._loaders: list[ElasticLoader] = []
        self.session.frozen_among(self._parameters)
        self._checked, self._asked = False, True
        self.passing: list[nn.Module] | None = None
        """Modules of this round only, which must be freed before the next one; None: the models. Until it begins."""
        self.recovery: AdapterRecovery | None = None
        """From the first step boundary on, if this process can outlive the round."""

    @property
    def restored(self) -> Restored | None:
        """What this start resumed; None for a fresh start."""
        return self._driver.restored

    def forget_restored(self) -> None:
        """The adapter loads a checkpoint of the user's own instead. Call before anything is added."""
        self._driver.forget_restored()
        self._saved, self.step = {}, 0

    # ---- parts ------------------------------------------------------------------------------------------------------

    def add(self, kind: str, part: Stateful) -> None:
        """Add `part` to every cut, and load its restored state: schedulers and objects by class, others by order."""
        parts = self._parts.setdefault(kind, [])
        saved = self._saved.get("parts", {}).get(kind, [])
        names = self._saved.get("classes", {}).get(kind)
        if names is None:
            places = list(range(len(saved)))[len(parts) :]
        else:
            of_class = [place for place, name in enumerate(names) if name == type(part).__name__]
            places = of_class[self._classes(kind).count(type(part).__name__) :]
        if places:
            part.load_state_dict(saved[places[0]])
        parts.append(part)

    def _classes(self, kind: str) -> list[str]:
        return [type(one).__name__ for one in self._parts.get(kind, [])]

    def _parameters(self) -> Iterator[nn.Parameter]:
        for model in self._parts.get("model", []):
            yield from cast(nn.Module, model).parameters()

    def has(self, kind: str) -> bool:
        """True if a part of this kind was added."""
        return kind in self._parts

    def add_model(self, module: nn.Module, wrapped: nn.Module) -> None:
        """`module`: the model with its own parameter names. `wrapped`: the framework's wrapper."""
        self.add("model", module)
        self._undo += [handle.remove for handle in time_passes(self.session.clock, wrapped)]
        if not self.window.loaders:
            handle = wrapped.register_forward_pre_hook(lambda *_: self._before_forward(wrapped))
            self._forward_hooks.append(handle)
            self._undo.append(handle.remove)
        if isinstance(wrapped, DistributedDataParallel):
            self.window.follow(wrapped)
            orders = self._saved.get("bucket_orders", [])
            saved = orders[len(self._buckets)] if len(self._buckets) < len(orders) else ()
            self._buckets.append(keep_buckets(wrapped, saved))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The unwrapped optimizer; the first one's steps count. Raises UsageError for another class."""
        index = len(self._parts.get("optimizer", []))
        saved = self._saved.get("parts", {}).get("optimizer", [])[index : index + 1]
        for one in saved:
            refuse_other_class(optimizer, one, dict(enumerate(self._saved.get("optimizer_classes", []))).get(index))
        self.add("optimizer", optimizer)
        self.window.optimizers.append(optimizer)
        exact_optimizer_states([optimizer] if saved else [], saved)
        if index == 0:
            self._undo.append(optimizer.register_step_pre_hook(self.session.clock.optimizing).remove)
            self._undo.append(optimizer.register_step_post_hook(self._stepped).remove)

    def add_own_loader(self, loader: StatefulLoader) -> None:
        """A training loader with its own state, which is read when the optimizer steps."""
        self.add("loader", loader)
        if self._epoch_over:
            iter(loader)  # the state is after the last batch of an epoch; the loop's own iterator starts the next
        self._own.append(loader.state_dict())

    def elastic(self, loader: Any, *, accumulate: int, seed: int) -> ElasticLoader:
        """Make `loader` elastic, watch it, and set it to the position of the restored cut.

        `accumulate`: the user's setting, unless configuration or a checkpoint overrides it. The first loader determines
        the number of micro-batches in a step; all others follow.
        """
        name = f"train.{len(self._loaders)}" if self._loaders else "train"
        self._refuse_beside_leased(name)
        made = elastic_loader(
            loader,
            global_batch_size=self._batch_of(loader, name, accumulate),
            seed=seed,
            name=name,
            num_replicas=self.place.world_size,
            rank=self.place.rank,
        )
        made.accumulate_by_hand()  # `Window` does it
        self.session.watch(name, made.sampler)
        calls = [functools.partial(_refuse_evaluation, made), self.boundary]
        made.before_batch += calls
        self._undo += [functools.partial(made.before_batch.remove, call) for call in calls]
        made.after_batch.append(self.session.clock.fetched)
        self._undo.append(lambda: made.after_batch.remove(self.session.clock.fetched))
        made.leads = not self._loaders
        if made.leads:
            self.session.clock.count_micro_batches(made.micro_batches)
        self._loaders.append(made)
        self._led_by(made)
        total = self._loaders[0].sampler.plan.total
        if made.sampler.plan.total != total:
            raise UsageError(
                f"loader {name!r} has {made.sampler.plan.total} micro-batches in a step, 'train' has {total}",
                hint="loaders of one loop step together: give all of them the same number",
            )
        return made

    def leased(self, loader: Any, *, accumulate: int) -> LeasedLoader:
        """Wrap `loader`, over a ShardDataset, for data leased from the master."""
        made = loader if isinstance(loader, LeasedLoader) else LeasedLoader(loader)
        if self.window.loaders or accumulate != 1:
            raise UsageError(
                f"leased dataset {made.name!r}: each micro-batch is a step, and no other training loader goes along "
                f"(gradient_accumulation_steps={accumulate})",
                hint="accumulate by a larger batch_size, zip other data inside the dataset, or leave ShardDataset out",
            )
        if self.session.membership is not None:
            self.session.membership.refuse(f"leased dataset {made.name!r}")
        self.session.lease(made.name, made)
        made.before_batch.append(self.boundary)
        self._undo.append(lambda: made.before_batch.remove(self.boundary))
        made.after_batch.append(self.session.clock.fetched)
        self._undo.append(lambda: made.after_batch.remove(self.session.clock.fetched))
        self._led_by(made)
        return made

    def _led_by(self, loader: ElasticLoader | LeasedLoader) -> None:
        """The step boundary is where `loader` is asked for a batch."""
        self.window.loaders.append(loader)
        while self._forward_hooks:
            self._forward_hooks.pop().remove()

    def _refuse_beside_leased(self, name: str) -> None:
        leased = next((one.name for one in self.window.loaders if isinstance(one, LeasedLoader)), None)
        if leased is not None:
            raise UsageError(
                f"loader {name!r} beside leased dataset {leased!r}: a step weighs gradients once, and each rank's "
                "share of leased data is another than its share of other data",
                hint="zip other data inside the dataset, or leave ShardDataset out",
            )

    def _batch_of(self, loader: Any, name: str, accumulate: int) -> int | None:
        """The global batch size; None: that of the restored state."""
        if self._loaders:
            return self._loaders[0].sampler.plan.total * (loader.batch_size or 1)
        if self.config.global_batch_size or self.session.restored_data(name) is not None:
            return self.config.global_batch_size
        return (loader.batch_size or 1) * self.place.world_size * accumulate

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs left of n, over all restarts: see `ElasticLoader.epochs`."""
        for epoch in self.window.loaders[0].epochs(n) if self.window.loaders else range(self._epoch, n):
            self._epoch = epoch
            yield epoch
            self._epoch, self._epoch_over = epoch + 1, True

    def boundary(self) -> None:
        """Called at a step boundary: the last step is entirely over, the next batch is not fetched yet."""
        if not self._driver.alive:
            return
        if not self._checked:
            self._check()
        self._driver.before_fetch(self.step)
        self._driver.boundary(self.step, self.state)

    def _check(self) -> None:
        self._checked = True
        for kind, saved in self._saved.get("parts", {}).items():
            if len(saved) != len(self._parts.get(kind, [])):
                raise UsageError(
                    f"the checkpoint has {len(saved)} of kind {kind!r}, here are {len(self._parts.get(kind, []))}",
                    hint="prepare the same objects before the loop, or start over (resume='never')",
                )
        for kind, names in self._saved.get("classes", {}).items():
            if sorted(names) != sorted(self._classes(kind)):
                raise UsageError(
                    f"the checkpoint has of kind {kind!r}: {listed(names)}; here are: {listed(self._classes(kind))}",
                    hint="prepare the same objects before the loop, or start over (resume='never')",
                )
        refuse_sharded(pytree.flatten(self.state()).tensors)  # refuse unsupported state before training starts
        if self.session.membership is not None:
            models, optimizers = (cast(Any, self._parts.get(kind, [])) for kind in ("model", "optimizer"))
            ends = [loader.close for loader in self.window.loaders] + [self._let_go]
            self.recovery = AdapterRecovery(
                self.session, models, optimizers, self._extra, self.state, ends, passing=self.passing
            )
            self.passing = None
            self._driver.begin(self.recovery)

    def _let_go(self) -> None:
        self.window.forget()
        while self._buckets:  # they hold the wrapped models, which are of this round
            self._buckets.pop().close()
        while self._undo:
            self._undo.pop()()

    def _before_forward(self, model: nn.Module) -> None:
        """Without an elastic loader, the first forward after a step is the step boundary."""
        if self._asked and model.training and torch.is_grad_enabled():
            self._asked = False
            self.boundary()

    def _stepped(self, *_: object) -> None:
        """The first optimizer's post-hook."""
        self.step += 1
        if self.left_out and not self.window.loaders and not self.has("loader"):
            log.warning("%s; its place in the data is in no checkpoint", self.left_out)
        self.left_out = ""
        self._asked, self._epoch_over = True, False
        self._own = [loader.state_dict() for loader in self._parts.get("loader", [])]
        self._driver.stepped()

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The `state` part of a cut; `extra` replaces the current result of `_extra`."""
        extra = self._extra() if extra is None else extra
        parts = self._states(lambda kind: kind in ("model", "optimizer"))
        return {
            **extra,
            "step": self.step,
            "first_world": self.first_world,
            "optimizer_classes": self._classes("optimizer"),
            "classes": {kind: self._classes(kind) for kind in ("scheduler", "object") if kind in self._parts},
            "parts": {kind: (parts | extra["parts"])[kind] for kind in self._parts if kind != "loader" or self._own},
            "bucket_orders": [order.names for order in self._buckets],
        }

    def _extra(self) -> dict[str, Any]:
        """The state that changes outside of an optimizer step."""
        parts = self._states(lambda kind: kind not in ("model", "optimizer", "loader"))
        own = {"loader": self._own} if self._own else {}
        return {"epoch": self._epoch, "epoch_over": self._epoch_over, "parts": parts | own}

    def _states(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        return {kind: [one.state_dict() for one in parts] for kind, parts in self._parts.items() if wanted(kind)}

    def marked(self) -> dict[str, dict[str, Any]]:
        """The data state that includes the step just taken, for a checkpoint of the user's own.

        Leased data is not included, because the master keeps its ledger.
        """
        return {one.name: one.state_dict() for one in self._loaders}

    def validates(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """A validation follows the step: keep a step snapshot of this place, with the result of `change`.

        `change`: gets the state that changes outside of an optimizer step. Raises RoundEnded, see `AdapterRecovery`.
        """
        if self.recovery is not None and self.session.at_step_end:
            self.recovery.validates(self.step, lambda: change(self._extra()))

    def place_at(self, states: dict[str, dict[str, Any]], *, restored: bool = False) -> None:
        """Set the elastic loaders to other positions: those in a checkpoint of the user's own, unless `restored`."""
        for loader in self._loaders:
            loader.load_state_dict(states[loader.name])
        for one in self.window.loaders:
            if isinstance(one, LeasedLoader):
                log.warning(
                    "leased dataset %r: the model goes back to a checkpoint of your own, the master's ledger does not: "
                    "samples trained since that save are not handed out again", one.name,
                )  # fmt: skip
        if not restored:
            self._driver.forget_restored()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End training: make the last step durable, then leave as DONE."""
        if not self._driver.alive:
            return
        try:
            if self.window.loaders:
                self.window.loaders[0].finish()
            self._driver.finish(self.step, self.state())
        finally:
            self.close(p.Departure.DONE)

    def close(self, reason: p.Departure) -> None:
        """Give up the rank assignment without saving. Safe to call twice."""
        if not self._driver.alive:
            return
        for loader in self.window.loaders:
            if isinstance(loader, LeasedLoader):
                loader.close()
        while self._undo:
            self._undo.pop()()
        self._driver.close(reason, self.step)


def _refuse_evaluation(loader: ElasticLoader) -> None:
    """Raise UsageError if `loader` is iterated without gradients or steps, beyond a single peek."""
    if not torch.is_grad_enabled() and loader.sampler.progress.peeked:
        raise UsageError(
            f"loader {loader.name!r} is iterated without gradients, but it is a training loader: its place is that of "
            "the training, and each process has its own part of the samples",
            hint="for evaluation give a loader with shuffle=False",
        )


class _PartsForm(msgspec.Struct):
    """What the parts' own `load_state_dict` relies on."""

    model: list[dict[str, Any]] = []
    optimizer: list[OptimizerForm] = []
    scheduler: list[dict[str, Any]] = []


class _LoopForm(msgspec.Struct):
    """The form of `TrainingLoop.state`; fields with a default may be absent in older checkpoints."""

    step: p.Step
    parts: dict[str, list[Any]]
    first_world: p.World = 1
    optimizer_classes: list[str] = []
    classes: dict[str, list[str]] = {}
    bucket_orders: list[list[str]] = []
    epoch: p.Step = 0
    epoch_over: bool = False


def _taken(restored: Restored | None) -> dict[str, Any]:
    """The state to load into the parts that are added.

    Raises:
        UsageError: only the weights are requested, and there are none.
    """
    if restored is None:
        return {}
    if not restored.weights_only:
        return restored.state
    parts = restored.state["parts"]
    if not parts.get("model"):
        raise UsageError(
            f"the checkpoint holds no weights of a model: its parts are {listed(sorted(parts)) or 'none'}",
            hint="give the URL of a run whose model was prepared (Accelerate) or set up (Fabric), or resume='never'",
        )
    return {"parts": {"model": parts["model"]}}


def _check_state(state: Any) -> None:
    own_state(state, "parts", "Accelerate, Fabric or Transformers")
    require(state, _LoopForm, "the state")
    require(state["parts"], _PartsForm, "the parts of the state")
