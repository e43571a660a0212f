"""Transformers 5: one line makes a `Trainer` elastic.

    trainer = Trainer(model, args, train_dataset=dataset)
    trainer = elastic_trainer(trainer, save_to="checkpoints")
    trainer.train()

Trainer skips the batches before the place of a checkpoint, one by one, and its callbacks cannot change that. So the
Trainer gets a subclass of its class, whose methods turn the events of its loop into calls of `TrainingLoop`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.elastic.in_process_recovery import Recovery, elastic_run
from dlrover_hooks.errors import RoundEnded, UsageError
from dlrover_hooks.integrations.transformers import _private_api as private
from dlrover_hooks.integrations.transformers.preconditions import check_arguments, check_loader, stand_aside
from dlrover_hooks.integrations.transformers.step_weights import StepWeights
from dlrover_hooks.integrations.transformers.trainer_part import FreshState, TrainerPart
from dlrover_hooks.pytorch.adapter_loop import TrainingLoop
from dlrover_hooks.pytorch.even_batches import EvenLoader, is_uneven, step_batches
from dlrover_hooks.pytorch.skipped_ghosts import SkippedGhosts
from dlrover_hooks.session import Preempted, Restored
from dlrover_hooks.worker import surviving_process

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlrover_hooks.config.shared_keywords import SharedKeywords

log = logging.getLogger("dlrover_hooks")
T = TypeVar("T", bound=Trainer)
RECOVER = ("process", "restart")


def elastic_trainer(
    trainer: T,
    save_to: str | None = None,
    *,
    recover: str = "process",
    on_recover: Callable[[Recovery], object] | None = None,
    on_resize: Callable[[Recovery], object] | None = None,
    on_preempt: Callable[[Preempted], object] | None = None,
    **shared: Unpack[SharedKeywords],
) -> T:
    """Make `trainer` resume in the middle of an epoch, at any world size. Call it before `train`.

    Args:
        trainer: a `Trainer`, `Seq2SeqTrainer` or TRL's `SFTTrainer`. It is changed, and returned.
        save_to: fsspec URL of the durable checkpoints; None keeps them in memory only.
        recover: `"process"`: when another worker is lost, this one leaves `train` and enters it again in the same
            process, under `dlrover-hooks run`; `"restart"`: the launcher restarts all workers.
        on_recover: called with a `Recovery` at the first step boundary after such a loss, or after new workers joined.
        on_resize: the same, before it, if the world size changed.
        on_preempt: called with a `Preempted` when all ranks leave because one is preempted, once the step is saved.
        shared: see `SharedKeywords`; the meanings are those of `dlrover_hooks.config.Config`.

    `trainer.elastic` is its `ElasticTraining`. Everything runs on the training thread. Raises UsageError for settings
    that cannot work; `train` does so for arguments of the Trainer that cannot.
    """
    if isinstance(getattr(trainer, "elastic", None), ElasticTraining):
        raise UsageError("this Trainer is elastic already", hint="call elastic_trainer once for each Trainer")
    if recover not in RECOVER:
        raise UsageError(f"recover={recover!r}", hint=f"one of {', '.join(map(repr, RECOVER))}")
    config = settings.load(save_to=save_to, **shared)
    if (reason := stand_aside(trainer, config)) is not None:
        log.warning("dlrover-hooks is inactive: %s", reason)
        return trainer
    elastic = ElasticTraining(trainer, config, on_preempt)
    if recover == "process":
        elastic.run = lambda train: elastic_run(train, on_recover=on_recover, on_resize=on_resize)()
    private.with_events(trainer, elastic)
    return trainer


class ElasticTraining:
    """The training of one `Trainer` in a job: what `trainer.elastic` is. Made by `elastic_trainer`."""

    def __init__(
        self, trainer: Trainer, config: settings.Config, on_preempt: Callable[[Preempted], object] | None
    ) -> None:
        self.config = config
        self.loop: TrainingLoop | None = None
        """The membership in the job, in `train`; None before it."""
        self.run: Callable[[Callable[[], Any]], Any] = lambda train: train()
        self._trainer, self._on_preempt = trainer, on_preempt
        self._part = TrainerPart(trainer)
        self._loader: ElasticLoader | EvenLoader | None = None
        self.weights: StepWeights | None = None
        """Those of the elastic training loader; None before there is one."""
        self._fresh: FreshState | None = None
        self._epoch, self._paused = 0, -1
        self._rounds, self._stepped, self._resumed, self._finished = 0, False, False, False

    @property
    def step(self) -> int:
        """Optimizer steps in the model, over all restarts; 0 before `train`."""
        return self.loop.step if self.loop is not None else 0

    @property
    def restored(self) -> Restored | None:
        """What this start resumed; None for a fresh start, and before `train`."""
        return self.loop.restored if self.loop is not None else None

    @property
    def repeats(self) -> bool:
        """True if the micro-batch in `training_step` only repeats one with weight 0, so that all ranks have as many."""
        return self.weights is not None and self.weights.ghost

    # ---- train ------------------------------------------------------------------------------------------------------

    def train(self, inner: Callable[..., Any], resume: Any, given: dict[str, Any]) -> Any:
        """Instead of `Trainer.train`: in each round once, until it returns or fails."""
        check_arguments(self._trainer, given)
        if self._finished:
            raise UsageError(
                f"job {self.config.job}: the training of this Trainer is over",
                hint="make another Trainer, and make it elastic with another job=",
            )
        args: Any = self._trainer.args
        kept = args.gradient_accumulation_steps, args.ignore_data_skip
        args.ignore_data_skip = False

        def live() -> Any:
            args.gradient_accumulation_steps = kept[0]
            return self._live(inner, resume, given)

        try:
            return self.run(live)
        finally:
            args.gradient_accumulation_steps, args.ignore_data_skip = kept
            if surviving_process.current() is None:  # otherwise an enclosing `elastic_run` may call `train` again
                self._rounds = 0

    def _live(self, inner: Callable[..., Any], resume: Any, given: dict[str, Any]) -> Any:
        self._rounds += 1
        membership = surviving_process.current()
        if membership is not None:
            if self._rounds > 1:
                private.enter_round(self._trainer)
            private.group_again(cast(Any, self._trainer.args).ddp_timeout_delta)
        try:
            loop = self._begin()
            result = inner(resume_from_checkpoint=self._chosen(loop, resume), **given)
            loop.close(p.Departure.DONE)
        except BaseException as error:
            self._leave(error)
            raise
        self._finished = True
        return result

    def _begin(self) -> TrainingLoop:
        """Join the job, and find what to restore."""
        trainer = self._trainer
        before = self.loop.recovery if self.loop is not None else None
        self._stepped |= before is not None and before.stepped
        args: Any = trainer.args
        self.loop = self._loader = self.weights = before = None
        place = settings.place(rank=args.process_index, world_size=args.world_size)
        self.loop = loop = TrainingLoop(self.config, place, self._on_preempt)
        self._part, self._paused = TrainerPart(trainer), -1
        if loop.session.membership is not None:
            if self._fresh is None:
                self._fresh = FreshState(trainer)
            elif self._rounds > 1:
                self._fresh.put_back()
            if self._rounds > 1 and self._stepped and loop.restored is None:
                loop.session.membership.refuse("a training that lost a worker before anything was saved")
                raise RoundEnded(
                    "a worker was lost when steps were made and none was saved yet: the weights of this process have "
                    "them",
                    hint="the launcher restarts all workers; save_every= says how often to save",
                )
        return loop

    def _chosen(self, loop: TrainingLoop, resume: Any) -> Any:
        """What `resume_from_checkpoint` is for this round; None where the job's own state is newer, or all there is."""
        if loop.restored is not None and loop.restored.weights_only:
            return None
        found = get_last_checkpoint(cast(Any, self._trainer.args).output_dir) if resume is True else resume
        if loop.restored is None or not found:
            return resume if loop.restored is None else None
        step = _step_of(found)
        newer = self._rounds > 1 or loop.step >= step
        log.info(
            "dlrover-hooks resumes from %s: the job's own checkpoint is of step %d, %s of step %d",
            loop.restored.generation if newer else found, loop.step, found, step,
        )  # fmt: skip
        if not newer:
            loop.forget_restored()
        return None if newer else found

    def _leave(self, error: BaseException) -> None:
        """`train` was left by an exception: the job can be resumed."""
        loop = self.loop
        if loop is not None and loop.session.membership is None:
            loop.close(p.Departure.STOPPED if isinstance(error, KeyboardInterrupt) else p.Departure.FAILED)
        private.leave_round(self._trainer)

    # ---- `LoopEvents` -----------------------------------------------------------------------------------------------

    def loader(self, inner: Callable[[], Any]) -> Any:
        """The training loader: elastic, and with the same number of batches on every rank."""
        args: Any = self._trainer.args
        if not self._trainer.is_in_train:  # looked at from outside
            return inner()
        loop = self._joined
        plain = private.plain_loader(self._trainer, inner)
        check_loader(plain)
        seed = args.data_seed if args.data_seed is not None else args.seed
        made = loop.elastic(plain, accumulate=args.gradient_accumulation_steps, seed=seed)
        made.leads = False
        made.evened = True  # Trainer counts the same number of batches on every rank
        loop.window.averages = True
        plan = made.sampler.plan
        if made.sampler.cursor % plan.n % plan.global_batch_size:
            raise UsageError(
                f"global_batch_size={plan.global_batch_size}: the checkpoint was made in the middle of an epoch with "
                "another one, and Trainer counts the steps of whole epochs",
                hint="keep the global batch size until the epoch is over",
            )
        self._loader = EvenLoader(made) if is_uneven(plan) else made
        self.weights = StepWeights(self._trainer, self._loader, loop.session.clock)
        args.gradient_accumulation_steps = step_batches(plan)
        return self._loader

    def begin_state(self, epochs: int, steps: int, num_train_epochs: int) -> tuple[int, int]:
        """Restore the `TrainerState`; epochs and micro-batches of the next one that are in the model."""
        loop, loader = self._joined, self._loader
        assert loader is not None
        plan, share = loader.sampler.plan, step_batches(loader.sampler.plan)
        self._resumed = loop.restored is not None and not loop.restored.weights_only
        if not self._resumed and epochs + steps:  # the user's own checkpoint
            loop.step = self._trainer.state.global_step
            at = epochs * plan.n + steps // share * plan.global_batch_size
            loop.place_at({loader.name: loader.state_dict() | {"cursor": at}})
        loop.add("trainer", self._part)
        if not self._resumed:
            return epochs, steps
        if self._part.over:
            return num_train_epochs, 0
        at = loader.sampler.progress.following()
        epoch, within = divmod(at, plan.n)
        if (owed := self._part.owed) is not None and (epoch > owed["epoch"] or owed["over"] or _stops(owed)):
            epoch = owed["epoch"]  # all its steps are made, or the rest is left out; its end is not reached yet
            loop.place_at({loader.name: loader.state_dict() | {"cursor": (epoch + 1) * plan.n}}, restored=True)
            return epoch, (plan.full_steps() + plan.has_tail()) * share
        return epoch, within // plan.global_batch_size * share

    def prepared(self) -> None:
        """Restore model, optimizer, scheduler and scaler."""
        loop, trainer = self._joined, cast(Any, self._trainer)
        loop.add_model(trainer.model, trainer.model_wrapped)
        ddp = isinstance(trainer.model_wrapped, DistributedDataParallel)
        loop.passing = [trainer.model_wrapped] if ddp else []
        if ddp and self.weights is not None and self._loader is not None:
            self.weights.ghosts = SkippedGhosts(self._loader, trainer.model_wrapped)
            loop.session.clock.count_micro_batches(self.weights.ghosts.micro_batches)
        loop.add_optimizer(trainer.optimizer.optimizer)
        loop.add("scheduler", trainer.lr_scheduler)
        if trainer.accelerator.scaler is not None:
            loop.add("scaler", trainer.accelerator.scaler)

    def epoch(self, given: dict[str, Any]) -> None:
        """Where the first epoch continues."""
        self._epoch = given["epoch"]
        resumed, self._resumed = self._resumed, False
        if resumed:
            given["resume_from_checkpoint"] = private.OURS
        self._part.epoch_begins(given)

    def pauses(self) -> None:
        """Take a step snapshot: evaluation and saves have collectives, in which a worker may be lost."""
        loop, step = self.loop, self._trainer.state.global_step
        over, self._paused = self._paused == step, step
        if loop is None or loop.recovery is None or (due := self._part.due(self._epoch, over=over)) is None:
            return
        loop.validates(lambda extra: {**extra, "parts": extra["parts"] | {"trainer": [_with_due(extra, due)]}})

    def ends(self) -> None:
        """Make the last step durable, before metrics are logged and the best model is loaded."""
        loader = self._loader
        assert loader is not None
        if self._trainer.control.should_epoch_stop:
            loader.sampler.begin()  # an epoch that was left is over
        self._part.ended = True
        self._trainer.store_flos()  # a collective: after it, no rank has an evaluation left
        self._joined.finish()

    def scalars(self, logs: dict[str, float]) -> dict[str, float]:
        """Logs of the training loss, with what there is to say of the job."""
        if self.loop is None or "loss" not in logs:
            return logs
        session = self.loop.session
        return logs | {
            "dlrover/world_size": session.place.world_size,
            "dlrover/attempt": session.attempt,
            "dlrover/skipped_saves": session.skipped_saves,
        }

    @property
    def _joined(self) -> TrainingLoop:
        assert self.loop is not None
        return self.loop


def _stops(owed: dict[str, Any]) -> bool:
    return owed["should_epoch_stop"] or owed["should_training_stop"]


def _with_due(extra: dict[str, Any], due: dict[str, Any]) -> dict[str, Any]:
    (part,) = extra["parts"]["trainer"]
    return part | {"due": due}


def _step_of(checkpoint: str) -> int:
    """The `global_step` of a checkpoint of Trainer's own; -1 if it does not say."""
    path = os.path.join(checkpoint, "trainer_state.json")
    if not os.path.isfile(path):
        return -1
    with open(path, encoding="utf-8") as file:
        return int(json.load(file)["global_step"])
