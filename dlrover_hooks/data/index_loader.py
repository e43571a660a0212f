"""`ElasticIndices`: the samples of each optimizer step, for a loop that makes its batches itself.

crops = ElasticIndices(len(text) - block, batch_size=12, global_batch_size=48, optimizer=optimizer)
with AsyncCheckpointer("saved", model=model, optimizer=optimizer, loader=crops) as saved:
    while saved.step < 5000:
        for starts in crops:  # this worker's micro-batches of one step
            loss = model(*get_batch(starts)) / len(crops)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dlrover_hooks import config
from dlrover_hooks.data.loader import ElasticLoader, with_sampler
from dlrover_hooks.data.optimizer_step_hook import mark_on_step
from dlrover_hooks.data.order import Kind
from dlrover_hooks.data.sampler import ElasticSampler
from dlrover_hooks.errors import UsageError

log = logging.getLogger(__name__)


class ElasticIndices(ElasticLoader):
    """One iteration is one optimizer step: it yields an int64 tensor of sample indices per micro-batch of this worker.

    The indices of a step depend on the seed and the step's position only, never on the world size. The order has no
    end: after `n` indices the next permutation of `range(n)` begins, and every step is full. The loop decides how many
    steps are trained. Everything else is as for an `ElasticLoader`. Main thread only.

    A step is yielded again if the loop leaves it (`break`, `next(iter(indices))`) before the optimizer stepped.

    Args:
        n: indices are drawn from `range(n)`. A loop that draws its batches from random generators may ignore them:
            then `n` is any number not below the global batch.
        batch_size: indices per micro-batch.
        optimizer: its steps are counted.
        global_batch_size: indices per optimizer step over all workers; None = from the environment
            (`DLROVER_HOOKS_GLOBAL_BATCH_SIZE`), else as at the first start.
        order: see `dlrover_hooks.data.order`; "sequential" for 0, 1, 2, ...
        seed: of the order.
        name: of the loader, in the checkpoint; different for each of several loaders.
        num_replicas, rank: None = from the process group or the environment.

    Raises UsageError for invalid sizes.
    """

    def __init__(
        self,
        n: int,
        *,
        batch_size: int,
        optimizer: Optimizer,
        global_batch_size: int | None = None,
        order: Kind = "shuffle",
        seed: int = 0,
        name: str = "train",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        size = config.global_batch_size() if global_batch_size is None else global_batch_size
        sampler = ElasticSampler(
            n,
            batch_size=batch_size,
            global_batch_size=size,
            order=order,
            seed=seed,
            tail="carry",
            num_replicas=num_replicas,
            rank=rank,
        )
        loader = DataLoader(cast(Any, range(n)), batch_size)
        super().__init__(with_sampler(loader, sampler, seeded=False), sampler, name=name)
        self.by_hand, self.leads = True, False  # one iteration is one step, and there are no epochs
        self._pass: Iterator[torch.Tensor] | None = None
        self._over = True
        self.attach(optimizer)

    def __len__(self) -> int:
        """Micro-batches of this worker in each step."""
        return self.sampler.plan.micro_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        """This worker's micro-batches of the next step."""
        if not self._over and self.sampler.progress.marked == self.sampler.cursor:
            log.warning(
                "loader %r: the loop left a step before the optimizer stepped; that step is given again", self.name
            )
            self.rollback()
        return self._step()

    def _step(self) -> Iterator[torch.Tensor]:
        self._over = False
        for _ in range(len(self)):
            yield self._next()
        self._over = True

    def _next(self) -> torch.Tensor:
        """The next micro-batch; from the next permutation if the current one is used up."""
        while True:
            if self._pass is None or not self.live:
                self._pass = super().__iter__()
            if (batch := next(self._pass, None)) is not None:
                return batch
            self._pass = None

    def attach(self, optimizer: Optimizer) -> None:
        """Count the steps of `optimizer`. `detach` undoes it."""
        self._marks.append(mark_on_step(optimizer, self))

    def mark(self) -> int:
        """The optimizer stepped. Raises UsageError if micro-batches of this worker's step are still to come."""
        progress = self.sampler.progress
        if not progress.whole:
            raise UsageError(
                f"loader {self.name!r}: the optimizer stepped after {progress.current()[1]} of the {len(self)} "
                "micro-batches of this worker's step",
                hint="call optimizer.step() once per step, behind the loop over the indices",
            )
        return self.sampler.mark()

    def close(self) -> None:
        """See `ElasticLoader.close`."""
        self._pass = None
        super().close()
