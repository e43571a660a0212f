"""Lightning 2.6: one callback makes a `Trainer` elastic.

    trainer = Trainer(..., callbacks=[ElasticCallback(save_to="saved")])

The callback only turns Lightning's events into `Session` verbs. What it touches of Lightning that is not public is in
`_lightning_private.py`, one function each, each with a contract test.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks import config as settings
from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint import tree
from dlrover_hooks.config import Duration
from dlrover_hooks.data.loader import ElasticLoader, elastic_loader, supports
from dlrover_hooks.errors import UnsupportedState, UsageError
from dlrover_hooks.integrations import _lightning_private as private
from dlrover_hooks.integrations.ddp import BucketOrder
from dlrover_hooks.integrations.torch import exact_optimizer_states, prepare_ddp
from dlrover_hooks.session import Restored, Session

log = logging.getLogger("dlrover_hooks")


class ElasticCallback(Callback):
    """Exactly-once data, in-memory checkpoints and resume for one `Trainer`.

    Alone in `callbacks=[...]` it puts the elastic sampler into the training loaders, resumes this job's newest whole
    generation without `ckpt_path`, cuts at quiet points, and ends the run durably. With one process and no master it
    works by itself. Every argument is plain, for YAML and LightningCLI; `None` means the environment, then the default.

    Args:
        save_to: fsspec URL of the durable checkpoints; None keeps them in memory only.
        save_every: memory snapshot: optimizer steps, `"auto"` (at most 3.5 % of the step time), or a duration.
        persist_every: durable copy: optimizer steps or a duration.
        keep: durable generations kept.
        resume: `"auto"`, `"never"`, `"require"` or the URL of another checkpoint tree.
        job: the job's name; by default the launcher's.
        global_batch_size: samples per optimizer step; None keeps what the first start had.
        master: URL of the master; by default the launcher's, else none.
        token: the master's bearer token.
        storage_options: fsspec options of `save_to`.
        on_error: `"raise"` or `"warn"` for errors that need not stop training.
        sampler: False leaves the training loaders alone.
        checkpoint: False keeps no checkpoints.

    All hooks run on the training thread. Raises `UsageError` for settings that cannot work.
    """

    def __init__(
        self,
        save_to: str | None = None,
        *,
        save_every: Duration | None = None,
        persist_every: Duration | None = None,
        keep: int | None = None,
        resume: str | None = None,
        job: str | None = None,
        global_batch_size: int | None = None,
        master: str | None = None,
        token: str | None = None,
        storage_options: dict[str, Any] | None = None,
        on_error: str | None = None,
        sampler: bool = True,
        checkpoint: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._sampler, self._checkpoint = given.pop("sampler"), given.pop("checkpoint")
        self.config = settings.load(**given)
        self.session: Session | None = None
        """The seat in the job, from `setup` to `teardown`."""
        self._restored: Restored | None = None
        self._loaders: dict[str, ElasticLoader] = {}
        self._buckets: BucketOrder | None = None
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._fix_steps: int | None = None

    @property
    def restored(self) -> Restored | None:
        """What this fit resumed, None for a fresh start."""
        return self._restored

    @property
    def state_key(self) -> str:
        """One key whatever the arguments, so that a moved `save_to` still finds the run it belongs to."""
        return "dlrover_hooks.ElasticCallback"

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.session.run, "attempt": self.session.attempt} if self.session is not None else {}

    # ---- coming up --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        reason = self._stand_aside(trainer, stage)
        if reason is not None:
            rank_zero_info(f"dlrover-hooks stands aside: {reason}")
            return
        place = settings.place(rank=trainer.global_rank, world_size=trainer.world_size)
        self._explain_devices(trainer)
        self.session = Session(self.config, place, checkpoint=self._checkpoint)
        try:
            self.session.join()
            self._restored = self.session.restore_plan()
        except BaseException:
            self.session.leave(p.Departure.FAILED)
            raise
        if self._restored is not None:
            rank_zero_info(f"dlrover-hooks resumes {self._restored.generation} from {self._restored.source.value}")
            private.resume_from(trainer, self._restored.state["lightning"], self._wins_over)
        if self._sampler:
            private.wrap_train_loaders(trainer, lambda loaders: self._elastic(trainer, loaders))

    def _stand_aside(self, trainer: Trainer, stage: str) -> str | None:
        if stage != "fit":
            return f"stage {stage!r} trains nothing"
        if self.config.disable:
            return "DLROVER_HOOKS_DISABLE is set"
        if private.fast_dev_run(trainer):
            return "fast_dev_run checks the code, not the data"
        if trainer.overfit_batches > 0:
            return "overfit_batches repeats the same samples on purpose"
        if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            return f"{type(trainer.strategy).__name__} is not supported yet (DDP and single device are)"
        return None

    def _explain_devices(self, trainer: Trainer) -> None:
        devices = private.fixed_devices(trainer)
        if devices is not None and trainer.world_size > 1:
            rank_zero_info(
                f"dlrover-hooks: Trainer(devices={devices!r}) must equal the workers started on each node, or "
                "Lightning refuses to start (ValueError about the number of processes). With GPUs devices='auto' "
                "follows the launcher; on CPU use devices=int(os.environ.get('WORLD_SIZE', 1))."
            )

    def _wins_over(self, path: str, explicit: dict[str, Any]) -> bool:
        """Our generation or the user's `ckpt_path`? The explicit one, unless ours is newer in the same run."""
        assert self.session is not None
        assert self._restored is not None
        generation, mark = self._restored.generation, explicit.get("callbacks", {}).get(self.state_key, {})
        newer = mark.get("run") == generation.run and generation.step > explicit.get("global_step", 0)
        why = f"it is newer than {path} in the same run" if newer else "ckpt_path= was given"
        rank_zero_info(f"dlrover-hooks resumes from {generation if newer else path}: {why}")
        if not newer:
            self._restored = None
            self.session.forget_restored()
        return newer

    def _elastic(self, trainer: Trainer, loaders: list[Any]) -> list[Any]:
        """Each training loader with the elastic sampler in it; those that must be left alone are named in the log."""
        names = ["train"] if len(loaders) == 1 else [f"train.{i}" for i in range(len(loaders))]
        return [self._elastic_one(trainer, name, loader) for name, loader in zip(names, loaders, strict=True)]

    def _elastic_one(self, trainer: Trainer, name: str, loader: Any) -> Any:
        assert self.session is not None
        if (reason := supports(loader)) is not None:
            log.warning(
                "training loader %r is left alone (%s): exactly-once data is then its own promise", name, reason
            )
            return loader
        before = self._loaders.get(name)
        state = before.sampler.handover() if before is not None else self.session.restored_data(name)
        schedule = any(isinstance(callback, GradientAccumulationScheduler) for callback in private.callbacks(trainer))
        accumulate = 1 if schedule else trainer.accumulate_grad_batches
        fresh = (loader.batch_size or 1) * trainer.world_size * accumulate
        wrapped = elastic_loader(
            loader,
            global_batch_size=self.config.global_batch_size or (state["G"] if state is not None else fresh),
            seed=settings.global_seed(),
            name=name,
            num_replicas=trainer.world_size,
            rank=trainer.global_rank,
        )
        if not schedule:
            self._accumulate(trainer, wrapped)
        self.session.watch(name, wrapped.sampler, state)
        wrapped.before_batch.append(lambda: self._before_fetch(trainer))
        self._loaders[name] = wrapped
        return wrapped

    def _accumulate(self, trainer: Trainer, loader: ElasticLoader) -> None:
        """Micro-batches per step so that the global batch stays what it was. Uneven ranks are refused for now."""
        plan = loader.sampler.plan
        micro_batches, uneven = divmod(plan.global_batch_size // plan.batch_size, plan.world_size)
        if uneven or micro_batches < 1:
            raise UsageError(
                f"a global batch of {plan.global_batch_size} in micro-batches of {plan.batch_size} cannot be shared "
                f"evenly by {plan.world_size} workers, and Lightning counts batches alike on every rank",
                hint=f"set global_batch_size= to a multiple of {plan.batch_size * plan.world_size}, or change "
                "batch_size",
            )
        if micro_batches != trainer.accumulate_grad_batches:
            rank_zero_info(f"accumulate_grad_batches={micro_batches} keeps the global batch {plan.global_batch_size}")
            trainer.accumulate_grad_batches = micro_batches

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is None:
            return
        self._hook = trainer.optimizers[0].register_step_post_hook(lambda *_: self._stepped())
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._prepare_ddp(trainer.strategy.model)
        if self._restored is not None:
            lightning = self._restored.state["lightning"]
            exact_optimizer_states(trainer.optimizers, lightning["optimizer_states"])
            self._fix_steps = private.batches_that_stepped(lightning)
        else:
            private.load_pending_loader_states(trainer)
        if self._checkpoint:
            tree.flatten(self._state(trainer))

    def _prepare_ddp(self, model: DistributedDataParallel) -> None:
        sampler = next(iter(self._loaders.values())).sampler if self._loaders else None
        saved = self._restored.state["bucket_order"] if self._restored is not None else []
        self._buckets = prepare_ddp(model, (lambda: sampler.weight) if sampler is not None else None, saved)

    def _stepped(self) -> None:
        if self.session is not None:
            self.session.stepped()

    def _before_fetch(self, trainer: Trainer) -> None:
        if self.session is not None:
            self.session.before_fetch(trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.session is None:
            return
        if self._fix_steps is not None:
            private.set_batches_that_stepped(trainer, self._fix_steps)
            self._fix_steps = None
        if not self._loaders:
            self.session.before_fetch(trainer.global_step)
        if self.session.batch_requested(trainer.global_step):
            self.session.cut(trainer.global_step, self._state(trainer))

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        checkpoint = private.dump(trainer)
        for key in ("hyper_parameters", "datamodule_hyper_parameters"):
            if key in checkpoint:
                checkpoint[key] = _plain(checkpoint[key])
        return {"lightning": checkpoint, "bucket_order": self._buckets.names if self._buckets is not None else []}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of the user's own (ModelCheckpoint) holds the step just taken, so its data state must, too."""
        private.replace_loader_states(trainer, checkpoint, _marked)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.finish(trainer.global_step, self._state(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        stopped = isinstance(exception, KeyboardInterrupt)
        self._leave(trainer, p.Departure.STOPPED if stopped else p.Departure.FAILED)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(trainer, p.Departure.DONE)

    def _leave(self, trainer: Trainer, reason: p.Departure) -> None:
        session, self.session = self.session, None
        if self._hook is not None:
            self._hook.remove()
        private.unwrap(trainer)
        self._hook = self._buckets = self._restored = None
        self._loaders.clear()
        if session is not None:
            session.leave(reason, trainer.global_step)


def _marked(loader: Any) -> dict[str, Any] | None:
    """The data state that includes the step just taken; None for a loader that is not ours."""
    if not isinstance(loader, ElasticLoader):
        return None
    return loader.state_dict() | {"cursor": loader.sampler.progress.marked}


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters that can be saved as they are; others as their repr, said once."""
    plain = {}
    for name, value in parameters.items():
        try:
            tree.flatten(value)
            plain[name] = value
        except UnsupportedState:
            private.warn_once(f"hyper-parameter {name!r} ({type(value).__name__}) is kept as its repr only")
            plain[name] = repr(value)
    return plain
