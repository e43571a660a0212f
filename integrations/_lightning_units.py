"""Lightning counts batches; a job that changes its world size must count optimizer steps. Two answers.

`EvenLoader` gives every rank the same number of batches, so that whatever Lightning does every so many batches
(validation, logging, the broadcast of a SIGTERM) happens on all ranks together. `Units` keeps settings that are given
in batches at the same number of steps when a step gets another number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils._pytree import tree_map

from dlrover_hooks.data.batch import Plan
from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.errors import UsageError


class EvenLoader:
    """An `ElasticLoader` with equally many batches on every rank: what a rank lacks in a step, it repeats as a ghost.

    A ghost costs no time, since the other ranks are still computing then, and its loss must be multiplied by 0. Only
    real batches are counted as samples. What it lacks is the `ElasticLoader`'s. Main thread only.
    """

    def __init__(self, elastic: ElasticLoader) -> None:
        self.elastic = elastic
        self.ghost = False
        """The batch last received is a repetition."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "elastic" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.elastic, name)

    def __len__(self) -> int:
        """Batches of a whole epoch, ghosts included; the same on every rank."""
        return epoch_batches(self.elastic.sampler.plan)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after a restore, else an epoch."""
        return self._batches(iter(self.elastic))  # at once: where several loaders are zipped all begin, then one cuts

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            missing = self._missing() if self.elastic.step_ends else 0
            spares = [tree_map(lambda leaf: leaf, batch) for _ in range(missing)]  # the loop may empty its containers
            self.ghost = False
            yield batch
            for spare in spares:
                self.ghost = True
                yield spare

    def _missing(self) -> int:
        progress, plan = self.elastic.sampler.progress, self.elastic.sampler.plan
        done = progress.current()[1]
        place = progress.base % plan.n
        if progress.finished and plan.has_tail(place):
            return tail_batches(plan, place) - done
        return step_batches(plan) - done

    def state_dict(self) -> dict[str, Any]:
        """See `ElasticLoader.state_dict`."""
        return self.elastic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ElasticLoader.load_state_dict`."""
        self.elastic.load_state_dict(state)


def step_batches(plan: Plan) -> int:
    """Batches of a full step on the rank that has most."""
    return -(-plan.total // plan.world_size)


def tail_batches(plan: Plan, place: int = 0) -> int:
    """Batches of the short last step of an epoch run from `place`, on the rank that has most; 0 without one."""
    if not plan.has_tail(place):
        return 0
    q = place + plan.full_steps(place) * plan.global_batch_size
    return max(msgspec.structs.replace(plan, rank=rank).step(q).micro_batches for rank in range(plan.world_size))


def epoch_batches(plan: Plan, place: int = 0) -> int:
    """Batches of an epoch from `place` on, the same on every rank."""
    return plan.full_steps(place) * step_batches(plan) + tail_batches(plan, place)


def is_uneven(plan: Plan) -> bool:
    """Do ranks differ in their number of batches, in full steps or in the short one?"""
    if plan.total % plan.world_size:
        return True
    if not plan.has_tail():
        return False
    q = plan.full_steps() * plan.global_batch_size
    return len({msgspec.structs.replace(plan, rank=r).step(q).micro_batches for r in range(plan.world_size)}) > 1


def loss_scale(loader: ElasticLoader | EvenLoader, *, weighed: bool) -> float:
    """Factor for the gradient of the current batch's loss. `weighed`: a communication hook has the rank's weight."""
    sampler, plan = loader.sampler, loader.sampler.plan
    if isinstance(loader, EvenLoader) and loader.ghost:
        return 0.0
    share = step_batches(plan) / plan.micro_batches  # Lightning divides by what the busiest rank has
    return sampler.loss_scale * share * (1.0 if weighed else sampler.weight * plan.world_size)


class Units:
    """What the user's Trainer counts in batches, for a step of another number of batches than the user wrote.

    `accumulate_grad_batches` as the user wrote it says how many batches a step was meant to have. Where a step has
    exactly that many, nothing is touched.
    """

    def __init__(self, trainer: Trainer, *, scheduled: bool) -> None:
        self.scheduled = scheduled
        """A GradientAccumulationScheduler sets the number of batches."""
        self.accumulate: int = 1 if scheduled else trainer.accumulate_grad_batches
        self._limit, self._interval = trainer.limit_train_batches, trainer.val_check_interval
        self._frequencies: list[tuple[Any, int]] = []

    def share(self, trainer: Trainer, plan: Plan) -> None:
        """Have Lightning accumulate what a step of this plan needs. Before it reads the length of the loaders.

        Raises UsageError where somebody else says when to step, and that would be another global batch.
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

    def _convert(self, trainer: Trainer, plan: Plan) -> None:
        now = step_batches(plan)
        trainer.accumulate_grad_batches = now
        if now == self.accumulate:
            return
        steps = plan.full_steps() + plan.has_tail()
        trainer.limit_train_batches = self._in_batches(self._limit, steps, now, plan)
        trainer.val_check_interval = self._in_batches(self._interval, steps, now, plan)

    def _in_batches(self, given: Any, steps: int, now: int, plan: Plan) -> Any:
        """`given` batches, or a share of the epoch, as batches of now; whole epochs and times stay as they are."""
        if isinstance(given, int) and given > 0:
            wanted = max(1, round(given / self.accumulate))
        elif isinstance(given, float) and 0 < given < 1:
            wanted = max(1, int(steps * given))
        else:
            return given
        return epoch_batches(plan) if wanted == steps else wanted * now

    def convert_schedulers(self, trainer: Trainer) -> None:
        """Step-wise schedulers with a frequency count batches, too. Once Lightning has made them."""
        now = trainer.accumulate_grad_batches
        if now == self.accumulate:
            return
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1:
                self._frequencies.append((config, config.frequency))
                config.frequency = config.frequency // math.gcd(config.frequency, self.accumulate) * now

    def restore(self, trainer: Trainer) -> None:
        """The user's own settings again."""
        if self.scheduled:
            return
        trainer.accumulate_grad_batches = self.accumulate
        trainer.limit_train_batches, trainer.val_check_interval = self._limit, self._interval
        for config, frequency in self._frequencies:
            config.frequency = frequency
