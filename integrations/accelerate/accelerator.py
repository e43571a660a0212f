"""Accelerate: one line makes an `Accelerator` elastic.

    accelerator = ElasticAccelerator(Accelerator(), save_to="checkpoints")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in accelerator.epochs(3):
        for batch in loader: ...
    accelerator.end_training()

Accelerate shards every DataLoader it is given, even a sharded one (24 of 40 samples were visited), and counts epochs
from zero after a restart. So training loaders are not passed to it: they become `PreparedLoader`s, which update
`GradientState` themselves.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device
from torch import nn
from torch.optim import Optimizer

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.loader import ElasticLoader, supports
from dlrover_hooks.elastic import in_process_recovery as elastic
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.accelerate.async_save import AsyncSaves
from dlrover_hooks.pytorch.adapter_loop import TrainingLoop, is_leased, is_training, keeps_own_state
from dlrover_hooks.pytorch.even_batches import Around
from dlrover_hooks.pytorch.tensor_loading import left_alone
from dlrover_hooks.session import Preempted, Restored

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlrover_hooks.config.shared_keywords import SharedKeywords

log = logging.getLogger("dlrover_hooks")
DATA_STATE = "elastic_data.json"
_SUPPORTED = {"NO", "MULTI_CPU", "MULTI_GPU"}
_OWN = {"accelerator", "config", "loop", "_accumulate", "_kept", "_saves", "_on_preempt"}


class ElasticAccelerator:
    """An `Accelerator` whose training loop can be interrupted anywhere and resumed at any world size.

    All other attributes are those of the wrapped Accelerator. `prepare` restores the objects passed to it. Cuts are
    taken when the batch after a step is requested from the training loader. Gradients are accumulated as the global
    batch requires, with or without `accumulate()`.

    Args:
        accelerator: a fresh Accelerator: nothing was prepared with it.
        save_to: fsspec URL of the durable checkpoints; None keeps them in memory only.
        on_preempt: called with a `Preempted` when all ranks leave because one is preempted, once the step is saved.
        shared: see `SharedKeywords`; the meanings are those of `dlrover_hooks.config.Config`.

    All methods run on the training thread. Raises UsageError for settings that cannot work.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        save_to: str | None = None,
        *,
        on_preempt: Callable[[Preempted], object] | None = None,
        **shared: Unpack[SharedKeywords],
    ) -> None:
        self.accelerator = accelerator
        self.config = settings.load(save_to=save_to, **shared)
        self.loop: TrainingLoop | None = None
        """The membership in the job, from the first `prepare` to `end_training`; None when the hooks are inactive."""
        self._accumulate = accelerator.gradient_accumulation_steps
        self._kept: list[Any] = []
        self._saves: AsyncSaves | None = None
        self._on_preempt = on_preempt
        if accelerator._models or accelerator._optimizers:
            raise UsageError(
                "the Accelerator has prepared something already, which would not be restored",
                hint="make the ElasticAccelerator first, then prepare everything with it",
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["accelerator"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.accelerator, name, value)

    @property
    def step(self) -> int:
        """Optimizer steps in the model, over all restarts; 0 when the hooks are inactive."""
        return self.loop.step if self.loop is not None else 0

    @property
    def restored(self) -> Restored | None:
        """What this start resumed; None for a fresh start, and before the first `prepare`."""
        return self.loop.restored if self.loop is not None else None

    # ---- setup ------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As `Accelerator.prepare`; then the prepared objects are restored.

        Training loaders are the shuffled ones of the call; if there are none, the first loader, if the call has an
        optimizer. They are made elastic. All other loaders are passed to Accelerate unchanged. A loader with its own
        state is kept in the cut and returned unchanged.
        """
        placement = device_placement if device_placement is not None else [None] * len(args)
        if (loop := self._come_up()) is None:
            return self.accelerator.prepare(*args, device_placement=device_placement)
        ours = [self._is_ours(arg, list(args)) for arg in args]
        if any(isinstance(arg, torch.utils.data.DataLoader) and not own for arg, own in zip(args, ours, strict=True)):
            loop.left_out = (
                "a loader that does not shuffle was taken for evaluation: for training give it to the call of prepare "
                "that has the optimizer, or prepare(elastic_loader(loader))"
            )
        rest = [(arg, where) for arg, where, own in zip(args, placement, ours, strict=True) if not own]
        made = (
            self.accelerator.prepare(*(arg for arg, _ in rest), device_placement=[w for _, w in rest]) if rest else ()
        )
        others = iter(made if len(rest) > 1 else (made,))
        result = [arg if own else next(others) for arg, own in zip(args, ours, strict=True)]
        for one in sorted((one for one, own in zip(result, ours, strict=True) if not own), key=_rank_of):
            if not any(one is kept for kept in self._kept):  # prepared before: Accelerate returns it unchanged
                self._kept.append(one)
                self._keep(loop, one)
        if self.accelerator.scaler is not None and not loop.has("scaler"):
            loop.add("scaler", self.accelerator.scaler)
        for index, own in enumerate(ours):
            if own:
                result[index] = self._train(loop, args[index], placement[index])
        return tuple(result) if len(result) != 1 else result[0]

    def _come_up(self) -> TrainingLoop | None:
        if self.loop is None and (reason := self._stand_aside()) is not None:
            log.warning("dlrover-hooks is inactive: %s", reason)
        elif self.loop is None:
            inner = self.accelerator
            place = settings.place(rank=inner.process_index, world_size=inner.num_processes)
            self.loop = TrainingLoop(self.config, place, self._on_preempt)
            inner.register_save_state_pre_hook(self._save_data)
            inner.register_load_state_pre_hook(self._load_data)
        return self.loop

    def _stand_aside(self) -> str | None:
        if self.config.disable:
            return "DLROVER_HOOKS_DISABLE is set"
        if self.accelerator.distributed_type.value not in _SUPPORTED:
            return left_alone(self.accelerator.distributed_type.value, "Accelerate", self.config.on_error)
        return None

    def _is_ours(self, one: Any, beside: list[Any]) -> bool:
        if isinstance(one, nn.Module | Optimizer | PreparedLoader) or not hasattr(one, "__iter__"):
            return False
        return keeps_own_state(one) or is_training(one, beside)

    def _train(self, loop: TrainingLoop, loader: Any, placement: bool | None) -> Any:
        """The loader for the training loop."""
        if keeps_own_state(loader):
            log.warning("%s keeps its own state: exactly-once data is its promise, it is not wrapped", type(loader))
            loop.add_own_loader(loader)
            return loader
        if not is_leased(loader) and (reason := supports(loader)) is not None:
            log.warning("a training loader goes to Accelerate as it is (%s)", reason)
            return self.accelerator.prepare(loader)
        if self.accelerator.split_batches:
            raise UsageError(
                "split_batches=True gives each process a part of the loader's batch; here a batch is one process's",
                hint="leave it out, give the batch_size of one process, and global_batch_size= for all of them",
            )
        seed = getattr(self.accelerator.dataloader_config, "data_seed", None) or 0
        if is_leased(loader):
            made = loop.leased(loader, accumulate=self._accumulate)
        else:
            made = loop.elastic(loader, accumulate=self._accumulate, seed=seed)
        self.accelerator.gradient_accumulation_steps = loop.window.micro_batches
        place = self.accelerator.device_placement if placement is None else placement
        return PreparedLoader(made, self.accelerator, loop, self.accelerator.device if place else None)

    def _keep(self, loop: TrainingLoop, one: Any) -> None:
        """Restore one prepared object, and add it to every cut."""
        if isinstance(one, nn.Module):
            loop.add_model(self.accelerator.unwrap_model(one, keep_torch_compile=False), one)
        elif isinstance(one, Optimizer):
            loop.add_optimizer(one.optimizer)  # pyright: ignore[reportAttributeAccessIssue]
            self._guard_zero_grad(loop, one)
        elif isinstance(one, AcceleratedScheduler):
            loop.add("scheduler", one.scheduler)
            each = one.step_with_optimizer and not one.split_batches  # one step per process in each step
            if each and loop.first_world != self.accelerator.num_processes:
                _keep_pace(one, loop.first_world)

    def _guard_zero_grad(self, loop: TrainingLoop, optimizer: Any) -> None:
        """Ignore `zero_grad` inside a window: zeroing before a backward would discard earlier micro-batches."""
        plain, state, window = optimizer.zero_grad, self.accelerator.gradient_state, loop.window

        def zero_grad(set_to_none: bool | None = None) -> None:
            if window.micro_batches == 1:
                plain(set_to_none)
            elif window.may_zero():
                kept, state.sync_gradients = state.sync_gradients, True
                plain(set_to_none)
                state.sync_gradients = kept

        optimizer.zero_grad = zero_grad

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs left of n, an interrupted one included: over all restarts exactly n (`range(n)` would repeat)."""
        return self.loop.epochs(n) if self.loop is not None else iter(range(n))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As `Accelerator.backward`, with the loss weighted so that short and unevenly shared steps are exact."""
        if self.loop is None:
            self.accelerator.backward(loss, **kwargs)
            return
        scale = self.loop.window.scale()
        self.accelerator.backward(loss if scale == 1.0 else loss * scale, **kwargs)
        self.loop.window.pending = not self.loop.window.ends

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: Any = 2) -> Any:
        """As Accelerate's; inside a window, where gradients are incomplete, it only measures the norm."""
        if self.loop is None or self.accelerator.sync_gradients:
            return self.accelerator.clip_grad_norm_(parameters, max_norm, norm_type)
        return nn.utils.clip_grad_norm_(parameters, math.inf, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As Accelerate's; does nothing inside a window, where gradients are incomplete."""
        if self.loop is None or self.accelerator.sync_gradients:
            self.accelerator.clip_grad_value_(parameters, clip_value)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """As Accelerate's: kept in its `save_state` and in every cut. Restored here; objects of one class by order."""
        self.accelerator.register_for_checkpointing(*objects)
        if (loop := self._come_up()) is not None:
            for one in objects:
                loop.add("object", one)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerate's for other loaders. An elastic loader has its position already and is returned unchanged."""
        if isinstance(dataloader, PreparedLoader):
            return dataloader
        return self.accelerator.skip_first_batches(dataloader, num_batches)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over: make the last step durable and leave the job. Safe to call twice."""
        if self.loop is not None:
            self.loop.finish()
            self.accelerator.gradient_accumulation_steps = self._accumulate

    def end_training(self) -> None:
        """`finish`, then wait for all saves, then Accelerate's own `end_training`."""
        self.finish()
        if self._saves is not None:
            self._saves.close()
        self.accelerator.end_training()

    def close(self, reason: p.Departure = p.Departure.FAILED) -> None:
        """Leave the job unfinished, to be resumed. Called automatically when the process ends."""
        if self.loop is not None:
            self.loop.close(reason)
            self.accelerator.gradient_accumulation_steps = self._accumulate
        if self._saves is not None:
            self._saves.close()

    # ---- Accelerate's own checkpoints -------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As Accelerate's, but asynchronous: only a copy is made in the step; for the folder see `wait_for_saves`.

        One folder may be being written and one more waiting; a third save waits for the first. State that cannot be
        copied is written within the step, with one warning. The folder appears atomically.

        Raises:
            StorageFailed: an earlier save failed (with `on_error="warn"` it is only logged).
            CheckpointError: earlier saves are not written within ten minutes.
        """
        if self.loop is None or kwargs or self.accelerator.project_configuration.save_on_each_node:
            return self.accelerator.save_state(output_dir, safe_serialization, **kwargs)
        if self._saves is None:
            self._saves = AsyncSaves(self.accelerator, on_error=self.config.on_error)
        return self._saves.save(output_dir, safe_serialization)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """As Accelerate's, after pending saves are written."""
        self.wait_for_saves()
        self.accelerator.load_state(input_dir, **kwargs)

    def wait_for_saves(self) -> None:
        """Return when all folders of `save_state` are written. Raises the error of a failed save. On each process."""
        if self._saves is not None:
            self._saves.wait()

    def _save_data(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Called by `save_state`: write the data positions beside its own files."""
        if self.loop is not None and self.accelerator.is_main_process:
            Path(output_dir, DATA_STATE).write_text(json.dumps(self.loop.marked()))

    def _load_data(self, models: list[nn.Module], input_dir: str) -> None:
        found = Path(input_dir, DATA_STATE)
        if self.loop is not None and found.exists():
            self.loop.place_at(json.loads(found.read_text()))


class PreparedLoader(Around):
    """A training loader for Accelerate's loop: elastic, batches on the device, `GradientState` updated.

    Other attributes are those of the `ElasticLoader`. Accelerate reads `end_of_dataloader` and `remainder` from its
    loaders. Nothing is padded, so the remainder is always 0.
    """

    _is_accelerate_prepared = True
    remainder = 0

    def __init__(
        self, elastic: ElasticLoader | LeasedLoader, accelerator: Accelerator, loop: TrainingLoop, device: Any
    ) -> None:
        self.elastic, self.device = elastic, device
        self.end_of_dataloader = False
        self._accelerator, self._loop = accelerator, loop
        self._gradients = GradientState()

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.end_of_dataloader = False
        self._gradients._add_dataloader(self)
        try:
            for batch in batches:
                self._align()
                if self.device is None:
                    yield batch
                else:
                    yield send_to_device(batch, self.device, non_blocking=self._accelerator.non_blocking)
        finally:
            self._gradients._remove_dataloader(self)
            self._loop.window.over()

    def _align(self) -> None:
        """Overwrite Accelerate's count of micro-batches, which also counts interrupted epochs."""
        window = self._loop.window
        if isinstance(self.elastic, ElasticLoader):
            self.end_of_dataloader = self.elastic.sampler.progress.finished
        window.received()
        self._accelerator.step = window.micro_batches - 1 if window.ends else window.number - 1
        self._gradients._set_sync_gradients(window.ends)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the cursor determines the epoch."""

    @property
    def total_batch_size(self) -> int:
        """Samples in one micro-batch over all processes."""
        return self.elastic.batch_size * self._accelerator.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples of an epoch over all processes."""
        return len(self.elastic.dataset)


@elastic.between_lives
def _forget() -> None:
    """Reset the rank, world size and process group that Accelerate keeps in class attributes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _rank_of(one: Any) -> int:
    """Models first, then optimizers, then schedulers."""
    return 0 if isinstance(one, nn.Module) else 1 if isinstance(one, Optimizer) else 2


def _keep_pace(scheduler: AcceleratedScheduler, times: int) -> None:
    """Keep the scheduler at the rate of the first start: Accelerate steps it once per process."""
    scheduler.split_batches = True  # from here on one step in each call
    once = scheduler.step

    def step(*args: Any, **kwargs: Any) -> None:
        inner = scheduler.scheduler
        for _ in range(times if scheduler.gradient_state.sync_gradients else 1):
            if inner._step_count > getattr(inner, "total_steps", math.inf):
                return
            once(*args, **kwargs)

    scheduler.step = step  # pyright: ignore[reportAttributeAccessIssue]
