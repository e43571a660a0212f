"""Plain PyTorch: one object beside the loop that restores on construction and saves at step boundaries.

loader = elastic_loader(DataLoader(...), optimizer=optimizer)
with AsyncCheckpointer("saved", model=model, optimizer=optimizer, loader=loader):
    for epoch in loader.epochs(3):
        for batch in loader:
            ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.checkpoint.restore.generation_loader import Opening
from dlrover_hooks.checkpoint.state.pytree import flatten
from dlrover_hooks.data.implicit_accumulation import Accumulation
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.elastic.adapter_recovery import AdapterRecovery
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.restored_value_check import own_state, require
from dlrover_hooks.pytorch.ddp_exactness import (
    BucketOrder,
    SyncAtEnds,
    never_rebuilds,
    weigh_gradients,
)
from dlrover_hooks.pytorch.even_batches import EvenLoader, leader
from dlrover_hooks.pytorch.extra_state import Extras, Stateful
from dlrover_hooks.pytorch.loader_kinds import keeps_own_state
from dlrover_hooks.pytorch.state_dict import NamedOptimizer, WholeState, bare
from dlrover_hooks.pytorch.step_phases import Removable, time_passes
from dlrover_hooks.pytorch.tensor_loading import Filling, is_sharded, refuse
from dlrover_hooks.session import Preempted, Restored, Session
from dlrover_hooks.step_driver import StepDriver
from dlrover_hooks.worker.step_clock import StepClock

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlrover_hooks.config.shared_keywords import SharedKeywords

log = logging.getLogger("dlrover_hooks")


Loader = ElasticLoader | EvenLoader | LeasedLoader


class _CheckpointForm(msgspec.Struct):
    """The form of `AsyncCheckpointer._state`; fields with a default may be absent in older checkpoints."""

    step: p.Step
    model: dict[str, Any]
    optimizer: dict[str, Any]
    extra: list[Any]
    bucket_order: list[str]
    extra_names: list[str] | None = None
    own: list[Any] = []


class AsyncCheckpointer:
    """Keeps `model`, `optimizer`, `loader` and `extra` in one consistent cut; use it as a context manager.

    The constructor restores the objects in place. Saves happen when the batch after a step is requested from the
    loader: everything of the step, schedulers included, is over then. Leaving the block makes the last step durable; an
    exception leaves the job unfinished, to be resumed.

    Args:
        save_to: fsspec URL; None keeps checkpoints in memory only.
        model: a module; DistributedDataParallel around it; or a model sharded by `fully_shard` (FSDP2).
        optimizer: the optimizer whose steps count. Others go into `extra`.
        loader: what `elastic_loader` returned, or an `EvenLoader` around it; or all training loaders, with different
            names. `even_batches.leader` chooses the loader whose weights apply to the step. A loader with its own
            `state_dict` and `load_state_dict` is kept as it is; if there is no other, a step is over at the next
            forward.
        extra: anything else with `state_dict` and `load_state_dict`, in a list or by name in a dict. In a list the
            class is the name, of a scheduler also its optimizer; two moving averages need a dict.
        on_preempt: called with a `Preempted` when all ranks leave because one is preempted, once the step is saved.
        shared: see `SharedKeywords`; the meanings are those of `dlrover_hooks.config.Config`. `global_batch_size`
            belongs to the loader.

    All methods run on the training thread.
    """

    def __init__(
        self,
        save_to: str | None = None,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader | Stateful | Sequence[Loader | Stateful],
        extra: Iterable[Stateful] | Mapping[str, Stateful] = (),
        on_preempt: Callable[[Preempted], object] | None = None,
        **shared: Unpack[SharedKeywords],
    ) -> None:
        self.step = 0
        self._ddp = _ddp(model)
        self._optimizer, self._whole = optimizer, WholeState(bare(model), optimizer)
        given = extra if isinstance(extra, Mapping) else list(extra)
        self._extra = Extras(given, self._whole.model)
        self._loaders, self._own = _checked([loader] if isinstance(loader, Loader) else loader)
        self._own_states, self._asked = [one.state_dict() for one in self._own], True
        if len({one.name for one in self._loaders}) != len(self._loaders):
            raise UsageError(
                f"the loaders are named {[one.name for one in self._loaders]}: each needs a name of its own",
                hint='elastic_loader(..., name="images"), or ShardDataset(..., name="images")',
            )
        if any(is_sharded(parameter) for parameter in model.parameters()):
            _refuse_uneven(self._loaders)
        leased = [one.name for one in self._loaders if isinstance(one, LeasedLoader)]
        if self._ddp is not None and leased and len(self._loaders) > 1:
            raise UsageError(
                f"leased dataset {leased[0]!r}: DistributedDataParallel weighs a step's gradients once, and each "
                "rank's share of leased data is another than its share of the loader beside it",
                hint="zip other data inside the dataset, or leave ShardDataset out",
            )
        self._accumulations = self._accumulate(list(given.values() if isinstance(given, Mapping) else given))
        self.config = settings.load(save_to=save_to, **shared)
        if shared.get("global_batch_size") is not None:
            _refuse_batch(self.config.global_batch_size, self._loaders)
        self._buckets: BucketOrder | None = None
        self._hooks: list[Removable] = []
        self._sync: SyncAtEnds | None = None
        self._driver: StepDriver | None = None
        if not self.config.disable:
            self._driver = StepDriver(self, self.config, self._place(), on_preempt=on_preempt)
            self._come_up(self._driver, leased)
        elif self._ddp is not None:
            self._share_gradients(self._ddp)

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
        if isinstance(error, AssertionError) and "No inf checks" in str(error) and self._accumulations:
            raise UsageError(
                "a GradScaler found no gradients: in a step of several micro-batches they are kept apart until it ends",
                hint="AsyncCheckpointer(..., extra=[scaler])",
            ) from error

    @property
    def restored(self) -> Restored | None:
        """What this start resumed; None for a fresh start."""
        return self._driver.restored if self._driver is not None else None

    @property
    def session(self) -> Session | None:
        """The membership in the job; None when the hooks are disabled."""
        return self._driver.session if self._driver is not None else None

    def wait_copied(self) -> None:
        """Return when the last snapshot is copied. Call it before you change weights yourself, outside a step."""
        if self._driver is not None:
            self._driver.session.wait_copied()

    def finish(self) -> None:
        """Training is over: make the last step durable and leave the job. Safe to call twice."""
        if self._driver is None or not self._driver.alive:
            return self._unshare_gradients()
        try:
            for first in self._loaders[:1]:
                first.finish()
            self._driver.finish(self.step, self._state())
        finally:
            self.close(p.Departure.DONE)

    def close(self, reason: p.Departure = p.Departure.FAILED) -> None:
        """Leave the job unfinished, to be resumed. Safe to call twice.

        Under `elastic_run`, FAILED keeps the rank assignment, because `elastic_run` handles the cause itself.
        """
        self._unshare_gradients()
        if self._driver is None or not self._driver.alive:
            return
        for hook in self._hooks:
            hook.remove()
        for loader in self._loaders:
            if self._boundary in loader.before_batch:
                loader.before_batch.remove(self._boundary)
            if self._driver.session.clock.fetched in loader.after_batch:
                loader.after_batch.remove(self._driver.session.clock.fetched)
            if isinstance(loader, LeasedLoader):
                loader.close()
        self._driver.close(reason, self.step)

    def _come_up(self, driver: StepDriver, leased: list[str]) -> None:
        try:
            self._say_unsupported(driver.session, leased)
            restored = driver.start(self._fit)
            for loader in self._loaders:
                if isinstance(loader, LeasedLoader):
                    driver.session.lease(loader.name, loader)
                else:
                    driver.session.watch(loader.name, loader.sampler)
            self._begin(driver, restored)
        except BaseException:
            self.close()
            raise

    def _begin(self, driver: StepDriver, restored: Restored | None) -> None:
        session = driver.session
        session.frozen_among(self._whole.model.parameters)
        saved: list[str] = []
        if restored is not None and restored.weights_only:
            self._whole.load(restored.state, weights_only=True)
        elif restored is not None:
            self._load(restored.state)
            saved = restored.state["bucket_order"]
        if self._ddp is not None:
            self._share_gradients(self._ddp)
            self._buckets = keep_buckets(self._ddp, saved)
        self._time_phases(session.clock)
        self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._stepped(driver)))
        for loader in self._loaders:
            loader.before_batch.append(self._boundary)
        if not self._loaders:
            self._hooks.append(self._whole.model.register_forward_pre_hook(lambda *_: self._before_forward()))
        if session.membership is not None:
            models, ends = [self._whole.model], [loader.close for loader in self._loaders]
            driver.begin(AdapterRecovery(session, models, [self._optimizer], self._extra_state, self._state, ends))

    def _time_phases(self, clock: StepClock) -> None:
        self._hooks.append(self._optimizer.register_step_pre_hook(clock.optimizing))
        self._hooks += time_passes(clock, self._ddp if self._ddp is not None else self._whole.model)
        for loader in self._loaders:
            loader.after_batch.append(clock.fetched)
        elastic = [loader for loader in self._loaders if isinstance(loader, ElasticLoader)]
        if elastic and elastic == self._loaders and len({loader.sampler.plan.total for loader in elastic}) == 1:
            clock.count_micro_batches(elastic[0].micro_batches)

    def _say_unsupported(self, session: Session, leased: list[str]) -> None:
        """Report what cannot be recovered in process."""
        if session.membership is None:
            return
        if leased:
            session.membership.refuse(f"leased dataset {leased[0]!r}")
        if any(is_sharded(parameter) for parameter in self._whole.model.parameters()):
            session.membership.refuse("a sharded model")

    def _place(self) -> settings.Place:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return settings.place(rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())
        place = settings.place()
        if place.world_size > 1 and not any(isinstance(one, LeasedLoader) for one in self._loaders):
            raise UsageError(
                f"{place.world_size} workers were started, but there is no process group: each would train alone",
                hint="call torch.distributed.init_process_group() and wrap the model with DistributedDataParallel",
            )
        return place

    def _accumulate(self, parts: Sequence[Stateful]) -> list[Accumulation]:
        """Defer everything that acts once per step to the end of its window, unless the loop does that itself."""
        found: list[Accumulation] = []
        for loader in self._loaders:
            if not isinstance(loader, ElasticLoader) or loader.by_hand:
                continue
            if loader.accumulation is None:
                loader.attach(self._optimizer)
            assert loader.accumulation is not None
            found.append(loader.accumulation)
        for window in dict.fromkeys(found):
            window.needs_extra = True
            for part in parts:
                if isinstance(part, torch.optim.Optimizer):
                    window.add_optimizer(part)
                else:
                    window.hold(part)
        return found

    def _share_gradients(self, ddp: DistributedDataParallel) -> None:
        """Weight gradients as the loader shares the samples, with hooks disabled too. Logs if that is impossible."""
        loaders = self._loaders  # not `self`: objects that DDP holds in C++ must not reference DDP
        weighed = weigh_gradients(ddp, self._weight(1 / torch.distributed.get_world_size(ddp.process_group)))
        for window in self._accumulations:
            window.reduced(weighed=bool(weighed))
        if not weighed and not self._accumulations and loaders:
            log.warning("gradients of an epoch's short last step are not weighted: %s", weighed.reason)
        self._sync = SyncAtEnds(ddp, self._step_ends())

    def _weight(self, alone: float) -> Callable[[], float]:
        """The weight of the current step; `alone` without an elastic loader."""
        loaders = self._loaders
        if len(loaders) == 1 and isinstance(loaders[0], ElasticLoader):  # called in each forward
            progress = loaders[0].sampler.progress
            return lambda: progress.weight
        return lambda: lead.weight if (lead := leader(loaders)) is not None else alone

    def _step_ends(self) -> Callable[[], bool]:
        """True if the step ends with the micro-batch last received, or without an elastic loader."""
        loaders = self._loaders
        if len(loaders) == 1 and isinstance(loaders[0], ElasticLoader):
            progress = loaders[0].sampler.progress
            return lambda: progress.step_ends
        return lambda: lead.step_ends if (lead := leader(loaders)) is not None else True

    def _unshare_gradients(self) -> None:
        if self._sync is not None:
            self._sync.close()

    def _fit(self, opening: Opening) -> Filling:
        if opening.weights_only:
            return Filling(opening, self._whole.targets(opening.state, weights_only=True))
        own_state(opening.state, "model", "AsyncCheckpointer")
        require(opening.state, _CheckpointForm, "the state")
        targets = self._whole.targets(opening.state)
        places = self._extra.places(opening.state)
        if (there := len(opening.state.get("own", []))) != len(self._own):
            refuse(
                [f"{there} loaders had a state of their own, here {len(self._own)} have"],
                "give AsyncCheckpointer(loader=...) the same loaders in the same order",
            )
        targets |= self._shards_of_extra(opening, places)
        for place, part in places:
            if isinstance(part, NamedOptimizer):
                targets |= part.targets(opening.state["extra"][place])
        return Filling(opening, targets)

    def _shards_of_extra(self, opening: Opening, places: list[tuple[int, Stateful]]) -> dict[str, torch.Tensor]:
        """The tensors in `extra` that are sharded here or were when they were saved."""
        index = opening.images.index()
        live = flatten({str(place): part.state_dict() for place, part in places}, where="state.extra").tensors
        return {
            name: tensor
            for name, tensor in live.items()
            if name in index and (is_sharded(tensor) or index[name].sharded)
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._whole.load(state)
        for place, part in self._extra.places(state):
            part.load_state_dict(state["extra"][place])
        self._own_states = list(state.get("own", []))
        for loader, saved in zip(self._own, self._own_states, strict=True):
            loader.load_state_dict(saved)

    def _stepped(self, driver: StepDriver) -> None:
        self.step += 1
        if self._own:
            self._own_states = [one.state_dict() for one in self._own]
        self._asked = True
        driver.stepped()

    def _before_forward(self) -> None:
        """Without an elastic loader, the first forward after a step is the step boundary."""
        if self._asked and self._whole.model.training and torch.is_grad_enabled():
            self._asked = False
            self._boundary()

    def _boundary(self) -> None:
        assert self._driver is not None
        self._driver.before_fetch(self.step)
        self._driver.boundary(self.step, self._state)

    def _extra_state(self) -> dict[str, Any]:
        """The state that changes outside of an optimizer step."""
        return {"extra": self._extra.states(), **({"own": self._own_states} if self._own else {})}

    def _state(self, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        """The `state` part of a cut; `beside` replaces the current result of `_extra_state`."""
        return {
            "step": self.step,
            **self._whole.save(),
            **(self._extra_state() if beside is None else beside),
            "extra_names": self._extra.names,
            "bucket_order": self._buckets.names if self._buckets is not None else [],
        }


def _checked(loaders: Any) -> tuple[list[Loader], list[Stateful]]:
    """(elastic loaders, loaders with their own state). Raises UsageError for any other, and if there is none."""
    found: list[Any] = list(loaders) if isinstance(loaders, Sequence) else [loaders]
    for one in found:
        if not isinstance(one, Loader) and not keeps_own_state(one):
            raise UsageError(
                f"loader={type(one).__name__} is not elastic: its place would not be in the checkpoint",
                hint="give what elastic_loader(loader, optimizer=optimizer) returned, and iterate over that",
            )
    if not found:
        raise UsageError("no loader was given: nothing says where the data is", hint="AsyncCheckpointer(loader=...)")
    ours = [one for one in found if isinstance(one, Loader)]
    for follower in ours[1:]:
        if isinstance(follower, ElasticLoader):
            follower.leads = False
    return ours, [one for one in found if not isinstance(one, Loader)]


def _refuse_batch(size: int | None, loaders: Sequence[Loader]) -> None:
    """Check `size` against the loaders, which have split the samples already."""
    for loader in loaders:
        has = None if isinstance(loader, LeasedLoader) else loader.sampler.plan.global_batch_size
        if has != size:
            what = "each micro-batch of leased data is a step" if has is None else f"it was made with {has}"
            raise UsageError(
                f"global_batch_size={size!r} comes too late for loader {loader.name!r}: {what}",
                hint=f"elastic_loader(loader, optimizer=optimizer, global_batch_size={size!r})"
                if has is not None
                else "give the DataLoader the batch_size of one process, and leave global_batch_size out",
            )


def _ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of the model, compiled or not."""
    while not isinstance(model, DistributedDataParallel):
        if not hasattr(model, "_orig_mod"):
            return None
        model = model.get_submodule("_orig_mod")
    return model


def _refuse_uneven(loaders: Sequence[Loader]) -> None:
    for loader in loaders:
        if isinstance(loader, ElasticLoader):
            raise UsageError(
                f"loader {loader.name!r} may have unequal numbers of batches on the ranks, and a sharded model would "
                "wait for ever in the forward of the rank that has more",
                hint="wrap it: EvenLoader(loader), and multiply the loss by its mean_scale",
            )


def keep_buckets(ddp: DistributedDataParallel, saved: Sequence[str]) -> BucketOrder:
    """Replay the bucket order `saved` by the previous run to DDP; if it is empty, record this run's order.

    Every rank calls it before the first backward.
    """
    buckets = BucketOrder(ddp)
    done = buckets.replay(saved) if saved else buckets.record()
    if not done and not never_rebuilds(ddp) and torch.distributed.get_world_size(ddp.process_group) > 2:
        log.warning("after a restart the first step may differ in the last bits: %s", done.reason)
    return buckets
