"""The parts of Transformers that have no public name. One function each, each with a test.

Seen in transformers 5.20 and 5.23, and TRL 1.16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, trainer
from transformers.trainer_callback import ExportableState

from dlrover_hooks.elastic import in_process_recovery as elastic

_module: Any = trainer

OURS = "dlrover-hooks"
"""Instead of the path of a checkpoint: the epoch continues in the middle, and everything is restored already."""


class BatchWeights(Protocol):
    """What the overridden methods of a `Trainer` do with the micro-batches of a step. Training thread."""

    def fetches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one step, as they are requested."""
        ...

    def counted(self, batches: list[Any]) -> list[Any]:
        """`batches` for the count of labels."""
        ...

    inside: bool
    """True in the training step of a micro-batch; False where a loss is computed for something else."""
    ghost: bool
    """True if the current micro-batch only repeats one."""
    forward_ended: Callable[[], object]
    """To be called when the loss of a micro-batch is computed."""
    accumulates: bool
    """True if a step has several micro-batches on each process."""

    def micro_batch(self) -> None:
        """The training step of the next micro-batch begins."""
        ...

    def trained(self, step: Callable[[], Any]) -> Any:
        """The loss of `step`, the training step of a micro-batch that may only repeat one, or be one of several."""
        ...

    def weighed(self, loss: Any, counted: Any) -> Any:
        """The loss for `backward`; `counted`: the number of labels in the step, if Trainer has counted them."""
        ...

    def tokens(self, inputs: Any) -> Any:
        """The inputs of a micro-batch that only repeats one, for the count of tokens."""
        ...


class LoopEvents(Protocol):
    """What the overridden methods of a `Trainer` call, see `with_events`. Training thread."""

    @property
    def weights(self) -> BatchWeights | None:
        """Those of the elastic training loader; None before there is one."""
        ...

    def train(self, inner: Callable[..., Any], resume: Any, given: dict[str, Any]) -> Any:
        """Instead of `train`, which is `inner(resume_from_checkpoint=..., **given)`."""
        ...

    def loader(self, inner: Callable[[], Any]) -> Any:
        """Instead of `get_train_dataloader`."""
        ...

    def begin_state(self, epochs: int, steps: int, num_train_epochs: int) -> tuple[int, int]:
        """A new `TrainerState` was made. Epochs and micro-batches that are trained: as Trainer counts, and in fact."""
        ...

    def prepared(self) -> None:
        """Model, optimizer and scheduler were prepared."""
        ...

    def epoch(self, given: dict[str, Any]) -> None:
        """An epoch begins. `given`: the arguments of `_run_epoch`, which may be changed."""
        ...

    def pauses(self) -> None:
        """A step, or an epoch, is over; what is due is logged, evaluated and saved next, with collectives."""
        ...

    def ends(self) -> None:
        """The last step is over; metrics and the best model come next."""
        ...

    def scalars(self, logs: dict[str, float]) -> dict[str, float]:
        """Logs with more in them."""
        ...


class _ElasticLoop(Trainer):
    """Overrides the methods of a Trainer's loop, see `with_events`."""

    elastic: LoopEvents

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("trial", "ignore_keys_for_eval"), args, strict=False)) | kwargs
        return self.elastic.train(super().train, resume_from_checkpoint, given)

    def get_train_dataloader(self) -> Any:
        return self.elastic.loader(super().get_train_dataloader)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        epochs, steps = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        return self.elastic.begin_state(epochs, steps, num_train_epochs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_for_training(*args, **kwargs)
        self.elastic.prepared()
        return made

    def _run_epoch(self, **given: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.elastic.epoch(given)
        with _no_skipping(given["resume_from_checkpoint"], given["train_dataloader"]):
            super()._run_epoch(**given)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != OURS:
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if (weights := self.elastic.weights) is not None:
            epoch_iterator = weights.fetches(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if (weights := self.elastic.weights) is not None:
            batch_samples = weights.counted(batch_samples)
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if (weights := self.elastic.weights) is None:
            return super().training_step(*args, **kwargs)
        weights.micro_batch()
        try:
            if not weights.ghost and not weights.accumulates:
                return super().training_step(*args, **kwargs)
            return weights.trained(functools.partial(super().training_step, *args, **kwargs))
        finally:
            weights.inside = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        found = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **more
        )
        if (weights := self.elastic.weights) is None:
            return found
        if weights.inside:
            weights.forward_ended()
        if return_outputs:
            return weights.weighed(found[0], num_items_in_batch), found[1]
        return weights.weighed(found, num_items_in_batch)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.elastic.pauses()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if (weights := self.elastic.weights) is not None and weights.ghost:
            inputs = weights.tokens(inputs)
        super()._track_num_input_tokens(inputs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.elastic.ends()
        return super()._finalize_training(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(self.elastic.scalars(logs), *args, **kwargs)


def with_events(trainer: Trainer, events: LoopEvents) -> None:
    """Let the loop of `trainer` call `events`, which becomes its `elastic`: give it a subclass of its class.

    Callbacks do not suffice: they receive a finished loader, and cannot start an epoch in the middle.
    """
    base = type(trainer)
    cast(Any, trainer).elastic = events
    trainer.__class__ = type(base.__name__, (_ElasticLoop, base), {"__module__": base.__module__})


@contextlib.contextmanager
def _no_skipping(checkpoint: Any, loader: Any) -> Iterator[None]:
    """Meanwhile `skip_first_batches`, which Trainer calls to resume in the middle of an epoch, returns `loader`."""
    skip = _module.skip_first_batches
    if checkpoint is not None:
        _module.skip_first_batches = lambda found, count=0: found if found is loader else skip(found, count)
    try:
        yield
    finally:
        _module.skip_first_batches = skip


def plain_loader(trainer: Trainer, make: Callable[[], Any]) -> Any:
    """The loader that `make` makes, without Accelerate's, which would shard it."""
    accelerator: Any = trainer.accelerator
    prepare = accelerator.prepare

    def keep(*args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], DataLoader) else prepare(*args, **kwargs)

    accelerator.prepare = keep
    try:
        return make()
    finally:
        del accelerator.prepare


def loss_divisor(trainer: Trainer, counted: Any) -> int:
    """By how much `training_step` divides the loss: the number of micro-batches of this step on this process; 0 if it
    does not, because the loss is one over all labels of the step.
    """
    here: Any = trainer
    of_step = here.loss_is_scaled_for_ga
    if of_step is None:
        of_step = (here.model_accepts_loss_kwargs and counted is not None) or here.compute_loss_func is not None
    return 0 if of_step else here.current_gradient_accumulation_steps


def loss_counters(trainer: Trainer) -> dict[str, Any]:
    """What is logged next: the sum of the losses since the last log, its step, and counters of operations and tokens.

    The last two are TRL's.
    """
    here: Any = trainer
    found = {"loss": here._tr_loss, "logged": here._globalstep_last_logged, "flos": here.current_flos}
    if hasattr(here, "_total_train_tokens"):
        found["tokens"] = here._total_train_tokens
        found["metrics"] = {name: list(values) for name, values in here._metrics["train"].items()}
    return found


def set_loss_counters(trainer: Trainer, found: dict[str, Any]) -> None:
    """Continue with the result of `loss_counters`. The mean loss at the end remains that of this call of `train`."""
    here: Any = trainer
    if (loss := found.get("loss")) is not None:
        here._tr_loss.copy_(loss)
        here._total_loss_scalar = -here._tr_loss.item()
    here._globalstep_last_logged = found.get("logged", here.state.global_step)
    here.current_flos = found.get("flos", 0.0)
    if "tokens" in found and hasattr(here, "_total_train_tokens"):
        here._total_train_tokens = found["tokens"]
        here._metrics["train"].clear()
        here._metrics["train"].update({name: list(values) for name, values in found["metrics"].items()})


@contextlib.contextmanager
def uncounted(trainer: Trainer) -> Iterator[None]:
    """Around a micro-batch that must not count in TRL's metrics: this process adds 0 to the sums over all processes."""
    accelerator: Any = trainer.accelerator
    if not hasattr(trainer, "_total_train_tokens"):
        yield
        return
    gather = accelerator.gather_for_metrics
    accelerator.gather_for_metrics = lambda data, *args, **kwargs: gather(torch.zeros_like(data), *args, **kwargs)
    try:
        yield
    finally:
        del accelerator.gather_for_metrics


def evaluate_and_save(trainer: Trainer, given: dict[str, Any]) -> None:
    """Do what `trainer.control` says is due, before an epoch continues. `given`: the arguments of `_run_epoch`."""
    here: Any = trainer
    names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
    here._maybe_log_save_evaluate(here._tr_loss, None, **{name: given[name] for name in names})


def stateful_callbacks(trainer: Trainer) -> list[Any]:
    """The callbacks whose state Trainer keeps in its own checkpoints."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def refresh_callback_states(trainer: Trainer) -> None:
    """Take the callbacks' states into a `TrainerState` that was made before they were restored."""
    for one in stateful_callbacks(trainer):
        states = trainer.state.stateful_callbacks
        if not isinstance(states[type(one).__name__], list):  # type: ignore[index]
            states[type(one).__name__] = one.state()  # type: ignore[index]


def leave_round(trainer: Trainer) -> None:
    """Release what belongs to the process group: the wrapped model, and the optimizer's wrapper."""
    here: Any = trainer
    here.accelerator.free_memory()
    here.model_wrapped = here.model
    inner = getattr(here.optimizer, "optimizer", None)
    here.optimizer = here.callback_handler.optimizer = here.optimizer if inner is None else inner
    here.callback_handler.train_dataloader = None
    here.is_in_train = False


def enter_round(trainer: Trainer) -> None:
    """Take the rank and world size of the environment, and make another Accelerator, as in a new process."""
    here: Any = trainer
    vars(here.args).pop("_setup_devices", None)
    here.args._setup_devices  # noqa: B018 - makes the process group
    here.create_accelerator_and_postprocess()
    here.control = TrainerControl()
    here.state.is_local_process_zero = here.is_local_process_zero()
    here.state.is_world_process_zero = here.is_world_process_zero()


def group_again(timeout: timedelta) -> None:
    """Make the process group once more, over the same store.

    `TrainingArguments` makes it before `train` is called; only groups that are made under `elastic_run` can be aborted.
    All ranks call this.
    """
    if not dist.is_initialized():
        return
    store = distributed_c10d.PrefixStore("elastic", distributed_c10d._get_default_store())
    backend, rank, world = dist.get_backend_config(), dist.get_rank(), dist.get_world_size()
    before = dist.group.WORLD  # lives on meanwhile: the descriptors of the new group must not be those of the old one
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    del before


@elastic.between_lives
def _forget() -> None:
    """Reset the rank, world size and process group that Accelerate keeps in class attributes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
