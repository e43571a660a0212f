"""The batch sampler inside an `ElasticLoader`: yields the ids of one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from dlrover_hooks.data.sample_seeds import PickedArray, SampleSeeds, SeededIds, SharedSampleSeeds
from dlrover_hooks.rng.generators import generators

if TYPE_CHECKING:
    from dlrover_hooks.data.sampler import ElasticSampler

END = object()


class Batches(BatchSampler):
    """The micro-batches of an `ElasticSampler`: lists of ids, or arrays if it was made with `yield_batches`.

    It is a BatchSampler, because frameworks look for one, but it slices a chunk of ids at once, without a Python step
    per id. seeded: the ids carry their seeds, see `dlrover_hooks.data.sample_seeds`. workers: other processes fetch.
    """

    def __init__(self, sampler: ElasticSampler, *, seeded: bool, workers: bool) -> None:
        super().__init__(sampler, sampler.plan.batch_size, drop_last=False)
        self.elastic = sampler
        self.watch = SharedSampleSeeds(sampler.seed) if seeded and not workers else None
        self._dice = self.watch or (SampleSeeds(sampler.seed, generators()) if seeded else None)
        self._again = False

    def __iter__(self) -> Iterator[Any]:
        for first, ids in self.elastic.batches():
            yield ids if self._dice is None or not self._dice.seeded else self._handed(first, ids)
            while self._again:
                self._again = False
                yield self._handed(first, ids)

    def __len__(self) -> int:
        return self.elastic.micro_batches()

    def fetch(self, source: Iterator[Any]) -> Any:
        """The next batch of the DataLoader's iterator, END after the last. The loop's random state does not change."""
        if self.watch is None:
            return next(source, END)
        return self.watch.fetch(partial(next, source, END), self._repeat)

    def _repeat(self) -> None:
        self._again = True

    def _handed(self, first: int, ids: Any) -> Any:
        assert self._dice is not None
        if self.watch is not None:
            self.watch.for_batch(first)
        elif self.elastic.yield_batches:
            return PickedArray.of(ids, first, self._dice.key)
        return ids if self.elastic.yield_batches else SeededIds(ids, first, self._dice)
