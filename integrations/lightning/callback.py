"""Lightning 2.6: one callback makes a `Trainer` elastic.

    trainer = Trainer(..., callbacks=[ElasticCallback(save_to="saved")])

The callback only translates Lightning's events into calls of `Session`. Its uses of Lightning's private API are in
`_private_api.py`, one function each, each with a contract test.
"""

from __future__ import annotations

import functools
import logging
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.checkpoint.state import pytree
from dlrover_hooks.config import Duration
from dlrover_hooks.data.leased.leased_loader import is_leased
from dlrover_hooks.data.loader import ElasticLoader, elastic_loader, supports
from dlrover_hooks.elastic.adapter_recovery import AdapterRecovery
from dlrover_hooks.elastic.in_process_recovery import Recovery
from dlrover_hooks.errors import RoundEnded, UsageError
from dlrover_hooks.integrations.lightning import _private_api as private, output_names as names
from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO as FlashCheckpointIO
from dlrover_hooks.integrations.lightning.batch_unit_conversion import BatchUnits, begin_epoch_again, draw_before
from dlrover_hooks.integrations.lightning.combined_loader import combine, marked
from dlrover_hooks.integrations.lightning.consistent_cut import check_state, cut, validating
from dlrover_hooks.integrations.lightning.preconditions import check_devices, check_length, other_strategy, stand_aside
from dlrover_hooks.integrations.lightning.preemption_signals import take_over
from dlrover_hooks.integrations.lightning.recovery import FitRounds
from dlrover_hooks.integrations.lightning.state_beside_optimizer import StateBesideOptimizer
from dlrover_hooks.integrations.lightning.stateful_loaders import OwnLoaders
from dlrover_hooks.pytorch.async_checkpointer import keep_buckets
from dlrover_hooks.pytorch.ddp_exactness import BucketOrder, weigh_gradients
from dlrover_hooks.pytorch.even_batches import EvenLoader, is_uneven, leader, loss_scale, step_batches
from dlrover_hooks.pytorch.skipped_ghosts import SkippedGhosts
from dlrover_hooks.pytorch.state_dict import exact_optimizer_states, refuse_other_class
from dlrover_hooks.pytorch.step_phases import Removable, time_passes
from dlrover_hooks.pytorch.tensor_loading import refuse_sharded
from dlrover_hooks.session import Preempted, Restored, Session
from dlrover_hooks.step_driver import StepDriver

log = logging.getLogger("dlrover_hooks")


class ElasticCallback(Callback):
    """Exactly-once data, in-memory checkpoints and resume for one `Trainer`.

    Alone in `callbacks=[...]` it puts the elastic sampler into the training loaders, resumes this job's newest complete
    generation without `ckpt_path`, takes cuts at step boundaries, and makes the end of the run durable. With one
    process it needs no master. All arguments have plain types, for YAML and LightningCLI; `None` means the environment,
    then the default.

    Args:
        save_to: fsspec URL of the durable checkpoints; None keeps them in memory only.
        save_every: memory snapshot: optimizer steps, `"auto"` (at most 3.5 % of the step time, and
            at most each 0.5 s), or a duration.
        persist_every: durable copy: optimizer steps or a duration.
        keep: durable generations kept: the newest so many, or a `Retention`, also as `"last=2,every_steps=1000"`.
        snapshot: `"eager"` copies at once, `"lazy"` overlaps the copy with the next forward and backward, `"auto"`
            measures and picks.
        resume: `"auto"`, `"never"`, `"require"`, another tree's URL; `"weights"`, `"weights:URL"`.
        job: the job's name; by default the launcher's.
        global_batch_size: samples per optimizer step; None keeps that of the first start.
        master: URL of the master; by default the launcher's, else none.
        token: the master's bearer token.
        storage_options: fsspec options of `save_to`.
        on_error: `"raise"` or `"warn"` for errors that need not stop training.
        replicas: 1 keeps a copy of each image on another node, in another failure domain if there is one.
        replica_mb_per_s: upper limit for sending copies from one node; 0: none.
        disable: True makes the callback do nothing.
        fresh: True starts a new run of the job, whatever was saved.
        preempt_signals: comma-separated names of the signals that announce a preemption.
        grace: time from such a signal until the worker is killed: a duration, or seconds.
        step_timeout: time without a step after which the log says where the worker is; `"auto"` learns it.
        on_stall: what to do then: `"warn"`, `"dump"`, `"restart-rank"` or `"restart-round"`.
        on_straggler: what to do when this rank is slow and the others wait for it: `"report"`, `"rebalance"`,
            `"relaunch"` or `"exclude"`.
        sampler: False leaves the training loaders unchanged.
        checkpoint: False keeps no checkpoints.
        recover: `"process"`: when another worker is lost, this one leaves `fit` and enters it again in the same
            process, under `dlrover-hooks run`; `"restart"`: the launcher restarts all workers.
        on_recover: called with a `Recovery` at the first step boundary after such a loss, or after new workers joined.
        on_resize: the same, before it, if the world size changed.
        on_preempt: called with a `Preempted` when all ranks leave because one is preempted, once the step is saved.

    All hooks run on the training thread. Raises `UsageError` for settings that cannot work.
    """

    _began_from: list[Any] | None = None
    """The `ckpt_path` with which this run began, and its step; None if it began without one."""
    _driver: StepDriver | None = None
    """From `setup` to `teardown`."""
    _survivor: AdapterRecovery | None = None
    _ghosts: SkippedGhosts | None = None

    def __init__(
        self,
        save_to: str | None = None,
        *,
        save_every: Duration | None = None,
        persist_every: Duration | None = None,
        keep: int | str | p.Retention | None = None,
        snapshot: str | None = None,
        resume: str | None = None,
        job: str | None = None,
        global_batch_size: int | None = None,
        master: str | None = None,
        token: str | None = None,
        storage_options: dict[str, Any] | None = None,
        on_error: str | None = None,
        replicas: int | None = None,
        replica_mb_per_s: int | None = None,
        disable: bool | None = None,
        fresh: bool | None = None,
        preempt_signals: str | None = None,
        grace: timedelta | str | float | None = None,
        step_timeout: timedelta | str | float | None = None,
        on_stall: str | None = None,
        on_straggler: str | None = None,
        sampler: bool = True,
        checkpoint: bool = True,
        recover: str = "process",
        on_recover: Callable[[Recovery], object] | None = None,
        on_resize: Callable[[Recovery], object] | None = None,
        on_preempt: Callable[[Preempted], object] | None = None,
        **misspelt: NoReturn,
    ) -> None:
        given = settings.keywords(locals(), misspelt)
        self._sampler, self._checkpoint, self._on_preempt = map(given.pop, ("sampler", "checkpoint", "on_preempt"))
        lives = [given.pop(name) for name in ("recover", "on_recover", "on_resize")]
        self.config = settings.load(**given)
        self.fits = FitRounds(self.config, *lives, checkpoint=checkpoint)
        self._loaders: dict[str, ElasticLoader | EvenLoader] = {}
        self._own: OwnLoaders | None = None
        self._units: BatchUnits | None = None
        self._weighed = False
        self._buckets: BucketOrder | None = None
        self._hooks: list[Removable] = []
        self._beside: StateBesideOptimizer | None = None
        self._again: int | None = None
        self._handover: dict[str, dict[str, Any]] = {}
        """Data positions at the end of the previous fit: the same Trainer may fit again."""
        self._fitted: weakref.ref[Trainer] | None = None
        self._versions: list[Any] = []
        self._trainer: weakref.ref[Trainer] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps in the model, over all restarts: the Trainer's `global_step`; 0 before a fit."""
        trainer = self._trainer() if self._trainer is not None else None
        return trainer.global_step if trainer is not None else 0

    @property
    def restored(self) -> Restored | None:
        """The checkpoint that this fit resumed, None for a fresh start."""
        return self._driver.restored if self._driver is not None else None

    @property
    def session(self) -> Session | None:
        """The membership in the job, from `setup` to `teardown`."""
        return self._driver.session if self._driver is not None else None

    @property
    def state_key(self) -> str:
        """A key that does not depend on the arguments, so that the run is still found after `save_to` has changed."""
        return "dlrover_hooks.ElasticCallback"

    def state_dict(self) -> dict[str, Any]:
        if self.session is None:
            return {}
        return {
            "run": self.session.run,
            "attempt": self.session.attempt,
            "versions": self._versions,
            "began_from": self._began_from,
        }

    # ---- setup ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if (reason := stand_aside(trainer, stage, disabled=self.config.disable)) is not None:
            rank_zero_info(f"dlrover-hooks is inactive: {reason}")
            return
        if (reason := other_strategy(trainer, self.config.on_error)) is not None:
            log.warning("dlrover-hooks is inactive: %s", reason)
            return
        place = settings.place(rank=trainer.global_rank, world_size=trainer.world_size)
        check_devices(trainer)
        private.come_first(trainer, self)  # a cut must not hold other callbacks' results of the batch after it
        self._trainer = weakref.ref(trainer)
        self._driver = StepDriver(self, self.config, place, checkpoint=self._checkpoint)
        session = self._driver.session
        self.fits.begin(trainer, pl_module, session)
        restored = self._driver.start(check=check_state)
        try:
            self.fits.check(trainer, session, restored)
        except BaseException:
            self._driver.close(p.Departure.FAILED)
            raise
        session.frozen_among(pl_module.parameters)
        self._began_from = None
        if restored is not None and restored.weights_only:
            private.begin_with(trainer, private.saved(restored)["state_dict"])
            self._driver.restored = None  # the fit begins at step 0
        elif restored is not None:
            self._began_from = private.saved(restored)["callbacks"].get(self.state_key, {}).get("began_from")
            names.keep_versions(trainer, private.saved(restored), self.state_key, session.run)
            private.resume_from(trainer, private.saved(restored), self._wins_over)
        self._versions = names.versions(trainer)
        names.write_over_earlier(trainer, session.run)
        if self._sampler:
            private.wrap_train_loaders(trainer, functools.partial(self._elastic, trainer))
        private.before_each_fetch(trainer, lambda: self._before_any_fetch(trainer))
        private.before_each_validation(trainer, lambda: draw_before(trainer, self.session, self._survivor, self._again))

    def _wins_over(self, path: str, explicit: dict[str, Any]) -> bool:
        """True if the restored generation replaces the user's `ckpt_path`: it is newer in the same run, or its run
        began with that path, as for a later launch of the same command, and a worker that joins or replaces others.
        """
        assert self._driver is not None
        assert self._driver.restored is not None
        generation, mark = self._driver.restored.generation, explicit.get("callbacks", {}).get(self.state_key, {})
        same = mark.get("run") == generation.run and generation.step > explicit.get("global_step", 0)
        began = self._began_from == [path, explicit.get("global_step", 0)]
        newer = same or began or self.fits.again
        why = f"it is newer than {path} in the same run" if newer else "ckpt_path= was given"
        rank_zero_info(f"dlrover-hooks resumes from {generation if newer else path}: {why}")
        if not newer:
            self._driver.forget_restored()
            self._began_from = None
        return newer

    def _elastic(self, trainer: Trainer, loaders: list[Any]) -> list[Any]:
        """Each training loader with the elastic sampler in it; unsupported loaders are logged and stay unchanged."""
        names = ["train"] if len(loaders) == 1 else [f"train.{i}" for i in range(len(loaders))]
        self._units = self._units or BatchUnits(trainer)
        self._own = OwnLoaders(trainer)
        return [self._elastic_one(trainer, name, loader) for name, loader in zip(names, loaders, strict=True)]

    def _elastic_one(self, trainer: Trainer, name: str, loader: Any) -> Any:
        assert self.session is not None
        assert self._own is not None
        if is_leased(loader):
            raise UsageError(
                f"training loader {name!r} is over a ShardDataset, which Lightning's loop cannot use: it fetches a "
                "batch ahead where it does not know the length, and cannot wait for what other workers give back",
                hint="give the dataset itself: every sample is trained once here, too; or write the loop with Fabric",
            )
        if (reason := supports(loader)) is not None:
            log.warning(
                "training loader %r is left alone (%s): exactly-once data is then its own promise", name, reason
            )
            if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
                self._own.add(loader)
            return loader
        before = self._loaders.get(name)
        state = before.sampler.handover() if before is not None else self.session.restored_data(name)
        state = state or self._handed_over(trainer, name, loader)
        wrapped: ElasticLoader | EvenLoader = elastic_loader(
            loader,
            global_batch_size=self._batch_of(trainer, name, loader, state),
            seed=settings.global_seed(),
            fixed_length=True,
            name=name,
            num_replicas=trainer.world_size,
            rank=trainer.global_rank,
        )
        wrapped.accumulate_by_hand()  # Lightning does it
        wrapped.leads = False  # the Trainer counts the epochs, after a restore too
        self.session.watch(name, wrapped.sampler, state)
        wrapped = EvenLoader(wrapped) if is_uneven(wrapped.sampler.plan) else wrapped
        self._loaders[name] = wrapped
        clock = self.session.clock
        wrapped.before_batch.extend([clock.boundary, lambda: self._before_fetch(trainer)])  # the RNG state, once a step
        wrapped.after_batch.append(clock.fetched)
        assert self._units is not None
        if wrapped is next(iter(self._loaders.values())):  # the others have the same number of micro-batches
            self._units.share(trainer, wrapped.sampler.plan)
        return wrapped

    def _handed_over(self, trainer: Trainer, name: str, loader: Any) -> dict[str, Any] | None:
        """The data position of this Trainer's previous fit; None for another Trainer or other data."""
        state = self._handover.get(name) if self._fitted is not None and self._fitted() is trainer else None
        if state is None or state["n"] == len(loader.dataset):
            return state
        log.warning("loader %r is not that of the fit before (other length): it starts at its beginning", name)
        return None

    def _batch_of(self, trainer: Trainer, name: str, loader: Any, state: dict[str, Any] | None) -> int | None:
        """The global batch: as given, as restored (None), or computed from the loader's batch at the first start."""
        first = next(iter(self._loaders.values()), None)
        if first is not None and first.name != name:  # loaders of one step have the same number of micro-batches
            return first.sampler.plan.total * (loader.batch_size or 1)
        assert self._units is not None
        if self.config.global_batch_size or state is not None:
            return self.config.global_batch_size
        return (loader.batch_size or 1) * trainer.world_size * self._units.accumulate

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._driver is None:
            return
        session = self._driver.session
        take_over(trainer, session, self._on_preempt)
        self._hooks.append(trainer.optimizers[0].register_step_post_hook(lambda *_: self._stepped()))
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._prepare(trainer.strategy.model)
            self._skip_ghosts(trainer, session, trainer.strategy.model)
        self._hooks += time_passes(
            session.clock, pl_module if trainer.strategy.model is None else trainer.strategy.model
        )
        if self.restored is not None:
            self._resume(trainer, self.restored)
        elif trainer.ckpt_path is not None:
            self._began_from = [str(trainer.ckpt_path), trainer.global_step]
            private.begin_next_epoch(trainer)
        private.load_pending_loader_states(trainer)
        check_length(trainer, self._loaders)
        combine(trainer, self._loaders)
        if self._units is not None and not self._units.scheduled:
            private.count_batches_anew(trainer, trainer.accumulate_grad_batches)
            self._units.convert_schedulers(trainer)
            self._units.continue_epoch(trainer, self._loaders)
        if self._checkpoint:
            refuse_sharded(pytree.flatten(self._state(trainer)).tensors)
            ends = [loader.close for loader in self._loaders.values()]
            self._beside = StateBesideOptimizer(trainer, self._own, self._buckets)
            state = functools.partial(self._state, trainer)
            self._survivor = self.fits.survivor(trainer, session, self._beside, state, ends)
            self._driver.begin(self._survivor)

    def _resume(self, trainer: Trainer, restored: Restored) -> None:
        """Restore what Lightning's own restore leaves out."""
        names.forget_missing(trainer)
        names.keep_saved_at(trainer, restored.state.get("saved_at", {}))
        lightning = private.saved(restored)
        classes = restored.state.get("optimizer_classes") or [None] * len(trainer.optimizers)
        for now, then, named in zip(trainer.optimizers, lightning["optimizer_states"], classes, strict=False):
            refuse_other_class(now, then, named)
        exact_optimizer_states(trainer.optimizers, lightning["optimizer_states"])
        self._again = private.batches_that_stepped(lightning)
        if restored.state["stopped"] == private.limits(trainer):
            private.stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._units is not None:
            self._units.epoch_ends(trainer)

    def _prepare(self, model: DistributedDataParallel) -> None:
        saved = self.restored.state["bucket_order"] if self.restored is not None else []
        if self._loaders:
            outcome = weigh_gradients(model, lambda: self._weight(1 / torch.distributed.get_world_size()))
            self._weighed = bool(outcome)
            if not outcome:
                rank_zero_info(f"dlrover-hooks weighs losses instead of gradients: {outcome.reason}")
        self._buckets = keep_buckets(model, saved)

    def _skip_ghosts(self, trainer: Trainer, session: Session, model: DistributedDataParallel) -> None:
        """Let ranks compute different numbers of micro-batches, where that is possible."""
        loader, automatic = leader(list(self._loaders.values())), trainer.lightning_module.automatic_optimization
        if loader is None or self._units is None or self._units.scheduled or not automatic:
            return
        if not private.fetches_before_training_steps(trainer):
            return
        self._ghosts = SkippedGhosts(loader, model)
        session.clock.count_micro_batches(self._ghosts.micro_batches)
        if step_batches(loader.sampler.plan) > 1:
            private.leave_out_training_steps(trainer, self._skips, keep=self._ghosts.rebalanced)
            if signal.SIGTERM in session.parting.signals.numbers:
                private.sync_signals_between_steps(trainer)

    def _skips(self, last: bool) -> bool:
        loader = leader(list(self._loaders.values()))
        ghost = isinstance(loader, EvenLoader) and loader.ghost
        return self._ghosts is not None and self._ghosts.leaves_out(ghost=ghost, last=last)

    def _weight(self, otherwise: float) -> float:
        loader = leader(list(self._loaders.values()))
        return loader.sampler.weight if loader is not None else otherwise

    def _stepped(self) -> None:
        if self._driver is not None:
            self._driver.stepped()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Weight the gradient of the loss for short and unevenly shared steps, without changing its value."""
        if self.session is not None:
            self.session.clock.forward_ended()
        loader = leader(list(self._loaders.values()))
        if self.session is None or loader is None:
            return
        scale = loss_scale(loader, weighed=self._weighed)
        if scale != 1.0 and loss.requires_grad:
            loss.register_hook(lambda grad: grad * scale)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The backward pass is over. It is a part of the optimizer's step here, whose pre-hook comes before it."""
        if self.session is not None and optimizer is trainer.optimizers[0]:
            self.session.clock.optimizing()

    def _before_fetch(self, trainer: Trainer) -> None:
        if self._driver is not None:
            self._driver.before_fetch(trainer.global_step)

    def _before_any_fetch(self, trainer: Trainer) -> None:
        if self._own is not None:
            self._own.note()
        if not self._loaders:
            self._before_fetch(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._driver is None:
            return
        begin_epoch_again(trainer, self._driver.session, self._again)
        self._again = None
        step_ends = self._driver.session.at_step_end
        try:
            self._driver.boundary(trainer.global_step, lambda: self._state(trainer))
        except RoundEnded:
            if self._beside is not None:
                self._beside.rests = step_ends
            raise

    def _state(self, trainer: Trainer, *, ended: bool = False) -> dict[str, Any]:
        return cut(trainer, self._own, self._buckets, ended=ended)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the copy, and take a step snapshot.

        Averaged weights may be swapped in now, and in the middle of a window no optimizer step has waited for the copy
        yet. With the snapshot, the finished step is not lost if a peer is lost during the validation.
        """
        if self.session is None:
            return
        self.session.wait_copied()
        begin_epoch_again(trainer, self.session, self._again)
        self._again = None
        if self._survivor is not None and self.session.at_step_end and not trainer.sanity_checking:
            private.validation_begins(trainer)
            self._survivor.validates(trainer.global_step, lambda: validating(trainer, self._buckets))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of the user's own (ModelCheckpoint) includes the step just taken, so must its data state."""
        over = private.epoch_is_over(trainer)
        private.replace_loader_states(trainer, checkpoint, lambda loader: marked(loader, over))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._driver is None:
            return
        for loader in self._loaders.values() if private.epoch_is_over(trainer) else ():
            loader.sampler.begin()  # an epoch cut short by a limit is over, too
        self._driver.finish(trainer.global_step, self._state(trainer, ended=True))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        session = self.session
        if session is None or session.membership is None or not isinstance(exception, Exception | SystemExit):
            stopped = isinstance(exception, KeyboardInterrupt)
            return self._leave(trainer, p.Departure.STOPPED if stopped else p.Departure.FAILED)
        session.membership.keep()  # before Lightning moves the model; `elastic_run` decides whether it is a fault
        before = self._handover
        self._leave(trainer, p.Departure.FAILED)
        self._handover = before  # the steps of this round are either in a save or lost

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(trainer, p.Departure.DONE)

    def _leave(self, trainer: Trainer, reason: p.Departure) -> None:
        driver = self._driver
        self._let_go(trainer)
        if driver is not None:
            driver.close(reason, trainer.global_step)

    def _let_go(self, trainer: Trainer) -> None:
        if self._buckets is not None:
            self._buckets.close()
        while self._hooks:
            self._hooks.pop().remove()
        private.unwrap(trainer)
        names.forget(trainer)
        if self._units is not None:
            self._units.restore(trainer)
        self._driver = self._buckets = self._units = self._own = self._survivor = self._beside = self._ghosts = None
        self._weighed = False
        self._handover = {name: marked(loader, over=False) or {} for name, loader in self._loaders.items()}
        self._loaders.clear()
        self._fitted = weakref.ref(trainer)
