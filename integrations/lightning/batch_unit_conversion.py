"""Lightning counts batches; a job that changes its world size must count optimizer steps.

`BatchUnits` keeps settings in batches at the same number of steps when the number of batches in a step changes.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_info

from dlrover_hooks.data.batch_plan import BatchPlan
from dlrover_hooks.elastic.adapter_recovery import AdapterRecovery
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.lightning import _private_api as private
from dlrover_hooks.integrations.lightning.combined_loader import Loaders, closing
from dlrover_hooks.pytorch.even_batches import epoch_batches, is_uneven, step_batches
from dlrover_hooks.session import Session


class BatchUnits:
    """Converts the Trainer's settings in batches for a step with another number of batches than the user's.

    The user's `accumulate_grad_batches` is the intended number of batches in a step. If a step has exactly that many on
    each rank, nothing is changed. If ranks differ, limits are whole steps: a part of one has other shares.
    """

    def __init__(self, trainer: Trainer) -> None:
        callbacks = private.callbacks(trainer)
        self.scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        """True if a GradientAccumulationScheduler sets the number of batches."""
        self.accumulate: int = 1 if self.scheduled else trainer.accumulate_grad_batches
        self._limit, self._interval = trainer.limit_train_batches, trainer.val_check_interval
        self._frequencies: list[tuple[Any, int]] = []
        self._whole_epoch: int | None = None

    def share(self, trainer: Trainer, plan: BatchPlan) -> None:
        """Make Lightning accumulate as many batches as a step of this plan needs.

        Call before Lightning reads the loaders' length. Raises UsageError if a scheduler or manual optimization
        determines the steps and would change the global batch.
        """
        now, size, world = step_batches(plan), plan.global_batch_size, plan.world_size
        if self.scheduled:
            if plan.total != world:
                raise UsageError(
                    f"GradientAccumulationScheduler changes the global batch, which is fixed at {size}: "
                    f"{plan.total} micro-batches for {world} workers",
                    hint="leave the scheduler out, or start with as many workers as before",
                )
            return
        if now != self.accumulate and not trainer.lightning_module.automatic_optimization:
            raise UsageError(
                f"a global batch of {size} takes {now} micro-batches on {world} workers, and manual optimization steps "
                "when it wants to",
                hint=f"make batch_size x {world} the global batch, or use automatic optimization",
            )
        self._convert(trainer, plan)
        if now != self.accumulate:
            rank_zero_info(f"accumulate_grad_batches={now} keeps the global batch {size}")

    def _convert(self, trainer: Trainer, plan: BatchPlan) -> None:
        now = step_batches(plan)
        trainer.accumulate_grad_batches = now
        if now == self.accumulate and not is_uneven(plan):
            return
        steps = plan.full_steps() + plan.has_tail()
        trainer.limit_train_batches = self._in_batches(self._limit, steps, now, plan)
        trainer.val_check_interval = self._in_batches(self._interval, steps, now, plan)

    def _in_batches(self, given: Any, steps: int, now: int, plan: BatchPlan) -> Any:
        """`given` batches, or a fraction of the epoch, in current batches; full epochs and times stay as they are."""
        if isinstance(given, int) and given > 0:
            wanted = max(1, round(given / self.accumulate))
        elif isinstance(given, float) and 0 < given < 1:
            wanted = max(1, int(steps * given))
        else:
            return given
        return epoch_batches(plan) if wanted == steps else wanted * now

    def convert_schedulers(self, trainer: Trainer) -> None:
        """Convert step-wise schedulers with a frequency, which count batches, too. Call once Lightning made them."""
        now = trainer.accumulate_grad_batches
        if now == self.accumulate:
            return
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1:
                self._frequencies.append((config, config.frequency))
                config.frequency = config.frequency // math.gcd(config.frequency, self.accumulate) * now

    def continue_epoch(self, trainer: Trainer, loaders: Loaders) -> None:
        """Set the number of batches of an epoch that was begun with another global batch, for this epoch only."""
        if not loaders or trainer.limit_train_batches != 1.0:
            return
        sampler = closing(private.mode(trainer), loaders).sampler
        if not (place := sampler.cursor % sampler.plan.n):
            return
        count = private.batches_done(trainer) + epoch_batches(sampler.plan, place)
        if count != private.batches(trainer):
            self._whole_epoch = private.batches(trainer)
            private.set_batches(trainer, count)

    def epoch_ends(self, trainer: Trainer) -> None:
        """The next epoch has its regular number of batches again."""
        if self._whole_epoch is not None:
            private.set_batches(trainer, self._whole_epoch)
            self._whole_epoch = None

    def restore(self, trainer: Trainer) -> None:
        """Restore the user's own settings."""
        if self.scheduled:
            return
        trainer.accumulate_grad_batches = self.accumulate
        trainer.limit_train_batches, trainer.val_check_interval = self._limit, self._interval
        for config, frequency in self._frequencies:
            config.frequency = frequency


def draw_before(
    trainer: Trainer, session: Session | None, survivor: AdapterRecovery | None, stepped: int | None
) -> None:
    """Called before the iterator of a validation is created: a repeated validation draws the same random numbers."""
    if session is not None and stepped is not None:
        session.before_fetch(trainer.global_step)
    if survivor is not None:
        survivor.fetches()


def begin_epoch_again(trainer: Trainer, session: Session, stepped: int | None) -> None:
    """Called before the first batch or validation of an epoch that is resumed in its middle.

    Lightning calls `on_train_epoch_start` when an epoch starts, not here. Two of its callbacks keep the result of that
    hook in no checkpoint: the factor of a schedule, and the scheduler of SWA. `stepped`: number of batches that stepped
    before; None if no epoch is resumed, or this was done already.
    """
    if stepped is None:
        return
    session.before_fetch(trainer.global_step)  # a repeated validation must draw the same random numbers
    private.set_batches_that_stepped(trainer, stepped)
    private.restart_is_over(trainer)
    for callback in private.callbacks(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        elif isinstance(callback, StochasticWeightAveraging):
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, rate in zip(trainer.optimizers[0].param_groups, rates, strict=True):
                group["lr"] = rate  # a new scheduler starts at its first rate
