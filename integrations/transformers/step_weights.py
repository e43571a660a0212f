"""Weights of the micro-batches of a step, whose losses are averaged over the ranks by DDP.

Trainer fetches all micro-batches of a step before the first forward, so the weights are kept until they are needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer

from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.integrations.transformers import _private_api as private
from dlrover_hooks.pytorch.even_batches import EvenLoader, mean_scale, step_batches
from dlrover_hooks.pytorch.skipped_ghosts import SkippedGhosts
from dlrover_hooks.worker.step_clock import StepClock

IGNORED = -100
"""Label that counts in no loss."""


class StepWeights:
    """The weights of one loader's batches. Training thread."""

    def __init__(self, trainer: Trainer, loader: ElasticLoader | EvenLoader, clock: StepClock) -> None:
        self._trainer, self._loader = trainer, loader
        self._even, self._progress, self._full_scale = not isinstance(loader, EvenLoader), loader.sampler.progress, 0.0
        self.forward_ended: Callable[[], object] = clock.forward_ended
        self.ghosts: SkippedGhosts | None = None
        """Set if ghosts can be left out."""
        self.accumulates = step_batches(loader.sampler.plan) > 1
        """Several micro-batches of a step are run here, ghosts included."""
        self._scales: list[float] = []
        self._number = -1
        self.ghost = False
        """True if the current micro-batch only repeats one, so that ranks do not differ in their number of batches."""
        self.inside = self._fetched = False
        """`inside`: in the training step of a micro-batch. Losses of anything else are not weighed."""

    def fetches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one step."""
        self._scales, self._number, self.ghost, self._fetched = [], -1, False, True
        for batch in batches:
            self._scales.append(self._scale())
            yield batch

    def _scale(self) -> float:
        """The weight of the batch last received. In full steps of an even plan it is always the same."""
        if not (self._even and self._progress.in_full_step):
            return mean_scale(self._loader)
        if not self._full_scale:
            self._full_scale = mean_scale(self._loader)
        return self._full_scale

    def micro_batch(self) -> None:
        """The training step of the next micro-batch begins."""
        self.inside = True
        self._number += 1
        self.ghost = self._scales[self._number] == 0.0

    def trained(self, step: Callable[[], Any]) -> Any:
        """The loss of `step`, the training step of the current micro-batch; 0 for a ghost that is left out."""
        last = self._number == len(self._scales) - 1
        if self.ghosts is not None and self.ghosts.leaves_out(ghost=self.ghost, last=last):
            return torch.zeros((), device=self._trainer.args.device)
        with private.uncounted(self._trainer) if self.ghost else contextlib.nullcontext():
            return step()

    def weighed(self, loss: Any, counted: Any) -> Any:
        """The loss, scaled: a step's gradient is the mean over its samples, or its labels where they are counted."""
        if not self.inside:
            return loss
        if divisor := private.loss_divisor(self._trainer, counted):
            factor = self._scales[self._number] * divisor
        else:
            factor = 0.0 if self.ghost else 1.0
        return loss if math.isclose(factor, 1.0, rel_tol=1e-12) else loss * factor

    def counted(self, batches: list[Any]) -> list[Any]:
        """`batches` for the count of labels: those that only repeat one have none. Not for evaluations."""
        fetched, self._fetched = self._fetched, False
        if not fetched or 0.0 not in self._scales:
            return batches
        return [
            _without_labels(batch) if scale == 0.0 else batch
            for batch, scale in zip(batches, self._scales, strict=True)
        ]

    def tokens(self, inputs: Any) -> Any:
        """The inputs of a micro-batch that only repeats one, for the count of tokens: none of its rows."""
        return {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _without_labels(batch: Any) -> Any:
    names = [name for name in ("labels", "shift_labels") if isinstance(batch.get(name), torch.Tensor)]
    return {**batch, **{name: torch.full_like(batch[name], IGNORED) for name in names}}
