"""Several training loaders in one Lightning loop: which epochs are over, and which short steps cannot be weighted.

A loader that ends its epoch with a short step leads (see `even_batches.leader`). The others must have an equal short
step there, or their rest of the epoch must be discarded at that point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import msgspec
from lightning.pytorch import Trainer

from dlrover_hooks.data.batch_plan import BatchPlan
from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.lightning import _private_api as private
from dlrover_hooks.pytorch.even_batches import EvenLoader, epoch_batches

Loaders = Mapping[str, ElasticLoader | EvenLoader]


class EpochRest(msgspec.Struct, frozen=True):
    """The rest of one loader's epoch."""

    name: str
    plan: BatchPlan
    place: int = 0

    @property
    def steps(self) -> int:
        """Steps left, the short one included."""
        return self.plan.full_steps(self.place) + self.plan.has_tail(self.place)

    @property
    def tail(self) -> tuple[int, int]:
        """(samples, batch size) of the short last step, which determine its weights. Zero samples: there is none."""
        left = (self.plan.n - self.place) % self.plan.global_batch_size
        return left * self.plan.has_tail(self.place), self.plan.batch_size


def closing(mode: str, loaders: Loaders) -> ElasticLoader | EvenLoader:
    """The loader that the epoch ends with."""
    choose = min if mode == "min_size" else max
    return choose(loaders.values(), key=lambda one: epoch_batches(one.sampler.plan))


def combine(trainer: Trainer, loaders: Loaders) -> None:
    """Keep finished epochs finished after a restore; refuse steps that cannot be weighted. Call in `on_train_start`."""
    if len(loaders) < 2:
        return
    mode = private.mode(trainer)
    check_short_steps(mode, loaders)
    over = ended(mode, loaders)
    private.end_loaders(trainer, over)
    for loader in over:
        loader.close()


def marked(loader: Any, over: bool) -> dict[str, Any] | None:
    """The data state including the step just taken; None for a loader that is not elastic.

    If the epoch is `over`, the state is at the next epoch's start.
    """
    if not isinstance(loader, ElasticLoader | EvenLoader):
        return None
    progress = loader.sampler.progress
    state = loader.state_dict()
    return state | {"cursor": max(progress.marked, progress.following())} if over else state


def ended(mode: str, loaders: Loaders) -> list[ElasticLoader | EvenLoader]:
    """Loaders at the start of their next epoch after a restore, while the epoch continues for others."""
    at_start = [one for one in loaders.values() if one.sampler.cursor % one.sampler.plan.n == 0]
    return at_start if mode == "max_size" and len(at_start) < len(loaders) else []


def check_short_steps(mode: str, loaders: Loaders) -> None:
    """Raises UsageError if a short step coincides with a different one: no single weight is right for both.

    Samples would be trained with weight 0, or ghosts with a weight. A step of one micro-batch is never short.
    """
    over = ended(mode, loaders)
    _refuse_clash(mode, [EpochRest(name, one.sampler.plan) for name, one in loaders.items()])
    left = {name: one for name, one in loaders.items() if one not in over}
    places = {name: one.sampler.cursor % one.sampler.plan.n for name, one in left.items()}
    _refuse_clash(mode, [EpochRest(name, one.sampler.plan, places[name]) for name, one in left.items()])


def _refuse_clash(mode: str, runs: Sequence[EpochRest]) -> None:
    for short, other in permutations(runs, 2):
        samples, size = short.tail[0], short.plan.global_batch_size
        if not samples or short.plan.total == 1 or not _clash(mode, short, other):
            continue
        raise UsageError(
            f"training loaders {short.name!r} and {other.name!r} (mode {mode!r}): {short.name!r} ends its epoch of "
            f"{short.plan.n} with a step of {samples} samples, and {other.name!r} has another number of them in that "
            "step: no weight of the ranks is right for both",
            hint=f"give {short.name!r} drop_last=True, or a length that is a multiple of the global batch ({size})",
        )


def _clash(mode: str, short: EpochRest, other: EpochRest) -> bool:
    if short.steps == other.steps:
        return short.tail != other.tail
    if mode == "min_size":  # the shorter one ends the epoch: the longer one's short step is never run
        return False
    return mode == "max_size_cycle" or other.steps > short.steps
