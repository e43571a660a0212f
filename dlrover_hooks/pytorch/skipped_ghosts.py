"""Fewer micro-batches for a slow rank in loops that run the same number of batches on every rank.

Lightning and Transformers do (`EvenLoader`). In a step that the master has distributed by the ranks' speeds, a slow
rank has ghosts instead, which must cost it nothing, so they are not computed. That is possible if no other rank waits
for them. DDP reduces gradients with the last batch of a step, which is never a ghost. So it depends on the collective
calls that the training step itself makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.pytorch import collective_calls
from dlrover_hooks.pytorch.even_batches import EvenLoader, step_batches

T = TypeVar("T")
SETTLED = 2
"""Steps after which DDP makes no more calls of its own in the forward pass: after the first one it agrees on the order
of its buckets. Each rank makes those calls in its first forward pass."""


class SkippedGhosts:
    """Of one training loader, under DDP. Training thread; `micro_batches`: any thread."""

    def __init__(self, loader: ElasticLoader | EvenLoader) -> None:
        self._loader, self._steps = loader, 0
        self.possible = True
        """False once a micro-batch made a collective call before the last one of its step."""

    @property
    def rebalanced(self) -> bool:
        """Whether ghosts are left out: the master has distributed the micro-batches, as all ranks found it possible."""
        return self._loader.sampler.plan.rebalanced

    def run(self, micro_batch: Callable[[], T], *, last: bool) -> T:
        """Call `micro_batch`, and look for collective calls in it unless it is the `last` one of its step."""
        if last or not self.possible or self._steps < SETTLED:
            self._steps += last
            return micro_batch()
        before = collective_calls.of_the_loop()
        result = micro_batch()
        self.possible = before is not None and collective_calls.of_the_loop() == before
        return result

    def micro_batches(self) -> tuple[int, int, bool]:
        """As `ElasticLoader.micro_batches`, for the batches that are computed: ghosts that are not left out count."""
        plan = self._loader.sampler.plan
        if not self.possible:
            return 0, 0, False
        return plan.micro_batches if plan.rebalanced else step_batches(plan), plan.total, plan.rebalanced
