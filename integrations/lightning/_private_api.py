"""Access to Lightning 2.6's private API: one function per need, each with a contract test.

Kept in one module so that it can be checked against a new Lightning release in one place.
"""

from __future__ import annotations

import functools
import logging
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from dlrover_hooks.protocol.restored_value_check import own_state
from dlrover_hooks.session import Restored

log = logging.getLogger("dlrover_hooks")


class _ElasticSource(_DataLoaderSource):
    """A loader source whose loaders pass through `wrap`. Works for loaders, collections, modules and DataModules."""

    def __init__(self, inner: _DataLoaderSource, wrap: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__(inner.instance, inner.name)
        self.inner, self._wrap = inner, wrap

    def dataloader(self) -> Any:
        given = self.inner.dataloader()
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
        wrapped = self._wrap(list(combined.flattened))
        if len(wrapped) == 1 and given is combined.flattened[0]:
            return wrapped[0]
        combined.flattened = wrapped
        return combined


def datamodules(trainer: Trainer) -> list[LightningDataModule]:
    """The data module of a fit, if it has one. `Trainer` has the attribute only after a fit has attached it."""
    found = getattr(trainer, "datamodule", None)
    return [found] if found is not None else []


def wrap_train_loaders(trainer: Trainer, wrap: Callable[[list[Any]], list[Any]]) -> None:
    """Must run in `setup`: from `on_train_start` on it has no effect, without an error."""
    loop = trainer.fit_loop
    source = loop._data_source
    loop._data_source = _ElasticSource(source.inner if isinstance(source, _ElasticSource) else source, wrap)
    loop._combined_loader = None


def resume_from(trainer: Trainer, checkpoint: dict[str, Any], wins: Callable[[str, dict[str, Any]], bool]) -> None:
    """Make this fit resume `checkpoint` natively (model, loops, callbacks, optimizers, schedulers), without a path.

    With an explicit `ckpt_path`, `wins(path, its content)` decides.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    @functools.wraps(original)
    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        original(checkpoint_path, weights_only=weights_only)
        if not checkpoint_path or wins(str(checkpoint_path), connector._loaded_checkpoint):
            connector._loaded_checkpoint = cast(Any, dict(checkpoint))

    cast(Any, connector).resume_start = resume_start


def saved(restored: Restored) -> dict[str, Any]:
    """The `Trainer`'s own checkpoint in `restored`."""
    return own(restored.state)


def own(state: dict[str, Any]) -> dict[str, Any]:
    """The `Trainer`'s own checkpoint in `state`. Raises UsageError if there is none."""
    return own_state(state, "lightning", "ElasticCallback")


def progress(trainer: Trainer) -> dict[str, Any]:
    """The progress of a fit's loops: epochs, batches, optimizer steps."""
    return trainer.fit_loop.state_dict()


def set_progress(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Set the progress of the fit's loops as if training had always been there, not as a restart."""
    loop = trainer.fit_loop
    loop.load_state_dict(progress)
    loop.restarting = False
    for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        one._loaded_from_state_dict = one._resuming_from_checkpoint = False
    loop._combined_loader_states_to_load = []
    loop.epoch_loop._skip_next_val = loop.epoch_loop.val_loop._has_run = False


def owe_validation(checkpoint: dict[str, Any]) -> None:
    """Mark the validation in `checkpoint` as interrupted, so that Lightning repeats it.

    `checkpoint` was taken as the validation began; unchanged, it would count as done and be skipped.
    """
    total = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"]
    total["started"] = total["ready"] = total["processed"] + 1


def validation_begins(trainer: Trainer) -> None:
    """Undo the change of `owe_validation` to the counts. Call in `on_validation_start`."""
    total = cast(Any, trainer.fit_loop.epoch_loop.val_loop.batch_progress).total
    total.started = total.ready = total.processed


class _Mine(list[torch.device]):
    """A list of devices whose every index gives this worker's own device.

    Local ranks do not change when other workers are lost, so they no longer match positions in the list.
    """

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


def follow_world(trainer: Trainer) -> None:
    """Update the Trainer's DDP strategy to the world of the current round.

    Lightning reads ranks and world size from the environment. But it distributes validation data by numbers of devices
    and nodes, and finds its own device by the local rank.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or not strategy.parallel_devices:
        return
    devices, own = strategy.parallel_devices, strategy.local_rank
    if strategy.num_nodes * len(devices) == strategy.world_size and (own < len(devices) or isinstance(devices, _Mine)):
        return
    device = devices[0] if devices[0].type == "cpu" else devices[own]
    strategy.parallel_devices = _Mine([device] * strategy.world_size)
    strategy.num_nodes = 1
    strategy._configure_launcher()  # checks both against the world size


def limits(trainer: Trainer) -> list[int | None]:
    """The limits that end a fit."""
    return [trainer.max_epochs, trainer.max_steps]


def begin_with(trainer: Trainer, weights: dict[str, Any]) -> None:
    """Make this fit begin with `weights`, loaded once the model exists. An explicit `ckpt_path` is loaded later."""
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    @functools.wraps(original)
    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        trainer.lightning_module.load_state_dict(weights)
        original(checkpoint_path, weights_only=weights_only)

    cast(Any, connector).resume_start = resume_start


def before_each_fetch(trainer: Trainer, call: Callable[[], object]) -> None:
    """Call `call` before each training batch is fetched, after the epoch's iterator is created.

    Not before the first batch of a training if Lightning fetches ahead (see `fetches_ahead`).
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop._on_before_fetch

    def on_before_fetch() -> None:
        call()
        original()

    cast(Any, loop)._on_before_fetch = on_before_fetch


def before_each_validation(trainer: Trainer, call: Callable[[], object]) -> None:
    """Call `call` before the iterator of a validation within the fit is created, which draws random numbers."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    original = loop.run

    def run() -> Any:
        if not trainer.sanity_checking:
            call()
        return original()

    cast(Any, loop).run = run


def leave_out_training_steps(trainer: Trainer, skips: Callable[[bool], bool], *, keep: bool) -> None:
    """With automatic optimization ask `skips(last)` before each batch, the `last` one of its step or another one.

    If it returns True, the batch is not run (training step, backward, optimizer) and adds no gradients. Its outputs are
    those of the previous batch if they are kept (`keep`), else a loss of 0. The last batch of a step must be run.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    original, outputs = loop.run, {"loss": torch.zeros((), device=trainer.lightning_module.device)}

    def run(optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        nonlocal outputs
        if not skips(not trainer.fit_loop._should_accumulate()):
            made = original(optimizer, batch_idx, kwargs)
            outputs = made if keep else outputs
            return made
        if (zero_grad := loop._make_zero_grad_fn(batch_idx, optimizer)) is not None:
            zero_grad()
        return outputs

    cast(Any, loop).run = run


def fetches_before_training_steps(trainer: Trainer) -> bool:
    """False if the training step fetches its batch itself (`dataloader_iter`), or Lightning fetches one ahead."""
    return not isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher) and not fetches_ahead(trainer)


def sync_signals_between_steps(trainer: Trainer) -> None:
    """Before a batch in the middle of a step, do not broadcast whether rank 0 has received SIGTERM.

    Lightning broadcasts this before each batch, so the ranks would wait for each other in the middle of a step. To be
    used only where Lightning does not handle SIGTERM.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop._broadcast_sigterm_tensor

    def broadcast() -> None:
        if not loop._should_accumulate():
            original()

    cast(Any, loop)._broadcast_sigterm_tensor = broadcast


def mode(trainer: Trainer) -> str:
    """How several training loaders are combined. Available from `on_train_start` on."""
    combined = trainer.fit_loop._combined_loader
    return combined._mode if combined is not None else ""


def end_loaders(trainer: Trainer, ended: Sequence[Any]) -> None:
    """End the training loaders in `ended` for this epoch (mode "max_size"). Call in `on_train_start`."""
    combined = trainer.fit_loop._combined_loader
    if combined is None or combined._iterator is None:
        return
    for number, loader in enumerate(combined.flattened):
        if any(one is loader for one in ended):
            combined._iterator.iterators[number] = iter(())


def fetches_ahead(trainer: Trainer) -> bool:
    """True if Lightning fetches one batch ahead, as it does if the epoch's length is unknown."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is None


def unwrap(trainer: Trainer) -> None:
    """Undo `wrap_train_loaders`, `resume_from`, and what was put before, around or between the parts of the loop."""
    trainer._checkpoint_connector.__dict__.pop("resume_start", None)
    for name in ("_on_before_fetch", "_broadcast_sigterm_tensor"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)
    trainer.fit_loop.epoch_loop.val_loop.__dict__.pop("run", None)
    trainer.fit_loop.epoch_loop.automatic_optimization.__dict__.pop("run", None)
    source = trainer.fit_loop._data_source
    if isinstance(source, _ElasticSource):
        trainer.fit_loop._data_source = source.inner


def dump(trainer: Trainer) -> dict[str, Any]:
    """The complete training state as Lightning itself would save it, hooks included, corrected by `discount`."""
    connector = trainer._checkpoint_connector
    cast(Any, connector)._get_loops_state_dict = lambda: loops(trainer)
    try:
        checkpoint = connector.dump_checkpoint(weights_only=False)
    finally:
        vars(connector).pop("_get_loops_state_dict", None)
    discount(checkpoint)
    return checkpoint


def discount(checkpoint: dict[str, Any]) -> None:
    """Do not count a batch that was fetched but not trained.

    Lightning removes it from the epoch's count, but not from the total nor as the epoch's last batch, and would
    validate at other steps, or skip the last batch.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    if progress["current"]["ready"] > progress["current"]["processed"]:
        progress["total"]["ready"] -= 1
        progress["is_last_batch"] = False


def loops(trainer: Trainer) -> dict[str, Any]:
    """The states of all loops, as in a checkpoint.

    Lightning's own way, `dataclasses.asdict`, takes 0.2 ms for copies of numbers.
    """
    names = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    return {name: _state_of(getattr(trainer, name), {}, "") for name in names}


_PARTS = weakref.WeakKeyDictionary[_Loop, tuple[int, list[str]]]()
"""For each loop, the number of its attributes and the names of those that are progress counters or loops."""


def _state_of(loop: _Loop, found: dict[str, Any], prefix: str) -> dict[str, Any]:
    found[f"{prefix}state_dict"] = loop.on_save_checkpoint()
    held = vars(loop)
    count, names = _PARTS.get(loop, (-1, []))
    if count != len(held):
        names = [name for name, value in held.items() if isinstance(value, (_BaseProgress, _Loop))]
        _PARTS[loop] = len(held), names
    for name in names:
        value = held[name]
        if isinstance(value, _Loop):
            _state_of(value, found, f"{prefix}{name}.")
        else:
            found[prefix + name] = _fields(value)
    return found


def _fields(one: Any) -> dict[str, Any]:
    return {
        name: _fields(value) if isinstance(value, _BaseProgress) else value
        for name in one.__dataclass_fields__
        for value in (getattr(one, name),)
    }


def counts(trainer: Trainer) -> tuple[list[tuple[str, ...]], list[str]]:
    """All counters of a fit's loops: the path of each in "fit_loop" of `loops`, and its attribute path from the loop.

    A loop has no other state of its own there; for the user's own loops see `adds_to_checkpoints`.
    """
    places = [("epoch_loop.state_dict", "_batches_that_stepped"), *_counts(trainer.fit_loop, "")]
    return places, ["epoch_loop._batches_that_stepped", *(".".join(place) for place in places[1:])]


def _counts(loop: _Loop, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, value in vars(loop).items():
        if isinstance(value, _Loop):
            yield from _counts(value, f"{prefix}{name}.")
        elif isinstance(value, _BaseProgress):
            yield from ((prefix + name, *place) for place in _numbers(value))


def _numbers(one: _BaseProgress) -> Iterator[tuple[str, ...]]:
    for name in one.__dataclass_fields__:
        value = getattr(one, name)
        yield from ((name, *place) for place in _numbers(value)) if isinstance(value, _BaseProgress) else [(name,)]


def keeps_state(callback: Callback) -> bool:
    """True if the callback overrides `state_dict`."""
    return is_overridden("state_dict", callback, parent=Callback)


def adds_to_checkpoints(trainer: Trainer) -> str:
    """The name of a class that overrides `on_save_checkpoint`; empty if there is none.

    Checks the module, the callbacks (except dlrover-hooks'), the precision plugin and the loops.
    """
    hooked: list[tuple[Any, type]] = [(one, Callback) for one in callbacks(trainer)]
    hooked += [(trainer.lightning_module, CheckpointHooks), (trainer.precision_plugin, CheckpointHooks)]
    for one, parent in hooked:
        ours = one.on_save_checkpoint.__module__.partition(".")[0] == "dlrover_hooks"
        if is_overridden("on_save_checkpoint", one, parent=parent) and not ours:
            return type(one).__name__
    own = (type(one).__name__ for one in _loops(trainer.fit_loop) if type(one).on_save_checkpoint not in _ON_SAVE)
    return next(own, "")


_ON_SAVE = (_Loop.on_save_checkpoint, _FitLoop.on_save_checkpoint, _TrainingEpochLoop.on_save_checkpoint)


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _loops(value)


def stateful_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders whose state Lightning saves, in its order.

    Skips its check against a Protocol, which takes 20 us.
    """
    combined = trainer.fit_loop._combined_loader
    flattened = combined.flattened if combined is not None else ()
    return [one for one in flattened if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def replace_loader_states(trainer: Trainer, checkpoint: dict[str, Any], state_of: Callable[[Any], Any]) -> None:
    """Put `state_of(loader)` (None: unchanged) for each stateful training loader into a dumped `checkpoint`."""
    loop, stateful = checkpoint.get("loops", {}).get("fit_loop", {}), stateful_loaders(trainer)
    if not stateful or not (states := loop.get("state_dict", {}).get("combined_loader")):
        return
    loop["state_dict"]["combined_loader"] = [state_of(one) or old for one, old in zip(stateful, states, strict=True)]


def load_pending_loader_states(trainer: Trainer) -> None:
    """Load the loaders' states that Lightning would drop, so that the data does not start over.

    It drops those of a `ckpt_path` written at an epoch's end, or if the loaders were needed before it was read
    (`estimated_stepping_batches` in `configure_optimizers`).
    """
    loop = trainer.fit_loop
    states = loop._combined_loader_states_to_load
    if states and loop._combined_loader is not None and loop._data_fetcher is not None:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []
        iter(loop._data_fetcher)


def epoch_is_over(trainer: Trainer) -> bool:
    """True if no batch of this epoch is left: it was read to its end, or to `limit_train_batches`."""
    progress = cast(Any, trainer.fit_loop.epoch_loop.batch_progress)
    trained = progress.current.ready == progress.current.processed
    return trained and (bool(progress.is_last_batch) or progress.current.ready >= trainer.fit_loop.max_batches)


def come_first(trainer: Trainer, callback: Callback) -> None:
    """Make `callback` the first one, so that its hooks run before the others'. Call in `setup`."""
    found = cast(Any, trainer).callbacks
    found.remove(callback)
    found.insert(0, callback)


def stop(trainer: Trainer) -> None:
    """Train nothing, as after early stopping. Call in `on_train_start`."""
    trainer.should_stop = True


def batches_that_stepped(checkpoint: dict[str, Any]) -> int:
    return checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]


def set_batches_that_stepped(trainer: Trainer, count: int) -> None:
    """Set the count for loggers: Lightning's is one too high if a checkpoint was not taken in `on_train_batch_end`."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = count


def restart_is_over(trainer: Trainer) -> None:
    """End Lightning's restart mode, which lasts for the whole epoch and skips `ReduceLROnPlateau` at its end."""
    trainer.fit_loop._restarting = False


def begin_next_epoch(trainer: Trainer) -> None:
    """Let the next epoch begin as any other one after a `ckpt_path` that was saved behind the last step of an epoch.

    Lightning counts that epoch as done but treats the next one as its continuation: it neither counts the next one as
    begun nor calls `on_train_epoch_start`. Each later checkpoint would then say that no epoch is in progress, and a fit
    that goes on at the end of an epoch would train one epoch too many. Call in `on_train_start`.
    """
    loop = trainer.fit_loop
    epochs = cast(Any, loop.epoch_progress).current
    if loop.restarted_mid_epoch and epochs.processed == epochs.ready:
        loop.reset_restart_stage()


def count_batches_anew(trainer: Trainer, per_step: int) -> None:
    """Convert the restored counts, which are batches of the previous run, to `per_step` for each step of this epoch.

    Call before the epoch loop starts (`on_train_start`). Does nothing if they match already.
    """
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step.current.completed
    batches = cast(Any, loop.batch_progress)
    shift = int(min(steps * per_step, trainer.fit_loop.max_batches)) - batches.current.processed if steps else 0
    for tracker in (batches.total, batches.current) if shift else ():
        for count in ("ready", "started", "processed", "completed"):
            setattr(tracker, count, max(0, getattr(tracker, count) + shift))


def batches(trainer: Trainer) -> int:
    """Number of batches in an epoch."""
    return int(trainer.fit_loop.max_batches)


def has_length(trainer: Trainer) -> bool:
    """True if the number of batches in an epoch is known."""
    return sized_len(trainer.fit_loop._combined_loader) is not None


def set_batches(trainer: Trainer, count: int) -> None:
    """Give this epoch `count` batches, and adjust a validation interval that is a fraction of the epoch."""
    loop = trainer.fit_loop
    loop.max_batches = count
    if loop._data_fetcher is not None and loop._data_fetcher.length is not None:
        loop._data_fetcher.length = count  # until it is iterated again
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch != float("inf"):
        trainer.val_check_batch = max(1, int(count * trainer.val_check_interval))


def batches_done(trainer: Trainer) -> int:
    """Number of trained batches of this epoch; `completed` is one less in a checkpoint of `on_train_batch_end`."""
    return cast(Any, trainer.fit_loop.epoch_loop.batch_progress).current.processed


def fast_dev_run(trainer: Trainer) -> bool:
    return bool(cast(Any, trainer).fast_dev_run)


def tunes(trainer: Trainer) -> bool:
    """True if this fit is a trial of `Tuner` (a learning rate, a batch size), which ends before anything is trained."""
    return any(getattr(callback, "_early_exit", False) for callback in callbacks(trainer))


def overfit_batches(trainer: Trainer) -> float:
    return float(cast(Any, trainer).overfit_batches)


def callbacks(trainer: Trainer) -> list[Callback]:
    return list(cast(Any, trainer).callbacks)


def count_files_under_way(
    leaves: Callable[[str], bool | None], link_later: Callable[[str, str], bool]
) -> Callable[[], None]:
    """Make `ModelCheckpoint` count files that are still being written as existing, and link to them later.

    It checks the folder for names that are taken, and links to the file just saved. `leaves(path)`: whether the file
    will exist (None: check the file system). `link_later(path, link)`: True if the link will be made when the file
    exists. Returns a function that restores the class.

    Patches the class, because a CheckpointIO has no access to the Trainer or its callbacks.
    """
    exists, link = ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint

    def file_exists(self: ModelCheckpoint, filepath: Any, trainer: Trainer) -> bool:
        expected = leaves(str(filepath)) if trainer.is_global_zero else None
        if expected is None:
            return exists(self, filepath, trainer)
        return trainer.strategy.reduce_boolean_decision(expected, all=False)

    def link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and link_later(filepath, linkpath):
            trainer.strategy.barrier()
        else:
            link(trainer, filepath, linkpath)

    cast(Any, ModelCheckpoint).file_exists = file_exists
    cast(Any, ModelCheckpoint)._link_checkpoint = staticmethod(link_checkpoint)

    def put_back() -> None:
        if ModelCheckpoint.file_exists is file_exists:  # otherwise the user's code has patched it on top
            cast(Any, ModelCheckpoint).file_exists = exists
        if ModelCheckpoint._link_checkpoint is link_checkpoint:
            cast(Any, ModelCheckpoint)._link_checkpoint = staticmethod(link)

    return put_back


@functools.cache
def warn_once(message: str) -> None:
    log.warning(message)


def combined_loader(trainer: Trainer) -> CombinedLoader | None:
    """The training loaders of this fit, as one; None before they are set up. A new one after a reload."""
    return trainer.fit_loop._combined_loader


def change_dump(trainer: Trainer, change: Callable[[dict[str, Any], bool], dict[str, Any]]) -> None:
    """Every checkpoint that Lightning makes becomes `change(checkpoint, weights_only)`, until `restore_dump`."""
    connector = cast(Any, trainer._checkpoint_connector)
    dump = connector.dump_checkpoint

    def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
        return change(dump(weights_only), bool(weights_only))

    connector.dump_checkpoint = dump_checkpoint


def restore_dump(trainer: Trainer) -> None:
    """Undo `change_dump`."""
    trainer._checkpoint_connector.__dict__.pop("dump_checkpoint", None)


def last_saved_step(callback: ModelCheckpoint) -> int:
    """The step of its last save, which is in no checkpoint."""
    return callback._last_global_step_saved


def set_last_saved_step(callback: ModelCheckpoint, step: int) -> None:
    """See `last_saved_step`."""
    callback._last_global_step_saved = step


def file_exists(callback: ModelCheckpoint, path: str) -> bool:
    """Whether `path` exists where `callback` writes."""
    return callback._fs.exists(path)


def is_local(path: Any) -> bool:
    """Whether Lightning takes `path` for a local one."""
    return _is_local_file_protocol(path)


def requeueing_environment(trainer: Trainer) -> SLURMEnvironment | None:
    """The SLURM environment in which Lightning would requeue the job itself; else None."""
    environment: Any = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None


def put_back_handlers(trainer: Trainer, number: signal.Signals) -> None:
    """If Lightning has put its own handlers for signal `number` before others: restore those others."""
    composed = signal.getsignal(number)
    if not isinstance(composed, _HandlersCompose):
        return
    own = trainer._signal_connector
    lightnings = (own._sigterm_notifier_fn, own._sigterm_handler_fn, own._slurm_sigusr_handler_fn)
    kept: list[Any] = [one for one in composed.signal_handlers if one not in lightnings]
    before: Any = kept[0] if len(kept) == 1 else _HandlersCompose(kept) if kept else signal.SIG_DFL
    signal.signal(number, before)


def has_written(logger: CSVLogger) -> bool:
    """Whether `logger` has opened its file."""
    return logger._experiment is not None


def set_version(logger: CSVLogger, version: int | str | None) -> None:
    """Choose the folder that `logger` writes to; None: the next free one."""
    logger._version = version
