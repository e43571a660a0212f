"""A sample's random numbers come from (seed, epoch, position): augmentation is the same in whatever process it runs.

Before a sample is fetched, the generators that datasets draw from (`dlrover_hooks.rng.generators`) are seeded for its
position in the endless order. So a sample is augmented alike with 0 or any number of DataLoader workers, at any world
size, and again after a restore. The random numbers

- in `__getitem__`, also through `torch.utils.data.Subset`, come from (seed, position of the sample);
- in `__getitems__` or in `__getitem__` of an array, from (seed, position of the micro-batch's first sample);
- in `collate_fn`, from the same generators, after the last numbers drawn. The last two are alike at every world size
  that runs the same micro-batches, that is in the full steps of an unchanged batch_size.

A dataset's own generators (`numpy.random.default_rng()`) are not seeded.

In a DataLoader worker all generators are seeded for each sample (7 us). With 0 workers the dataset draws from the
training loop's own generators: they are restored after each fetch, and only those that the dataset was observed to draw
from are seeded. The first batch is observed sample by sample. If the dataset draws from another generator later, that
batch is fetched once more, with that generator seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, cast

import numpy as np

from dlrover_hooks.data.feistel import Indices, splitmix
from dlrover_hooks.rng.generators import Generator, generators

_SAMPLE, _BATCH = 0x5A3D, 0xBA7C
_value = attrgetter("value")


class SampleSeeds:
    """Seeds generators for a position. key: the order's seed."""

    def __init__(self, key: int, seeded: list[Generator]) -> None:
        self.key = key
        self.seeded = seeded
        self._sample, self._batch = splitmix(splitmix(key) ^ _SAMPLE), splitmix(splitmix(key) ^ _BATCH)

    def for_sample(self, position: int) -> None:
        """The next draws belong to the sample at `position`."""
        self._seed(splitmix(self._sample ^ position))

    def for_batch(self, first: int) -> None:
        """The next draws belong to the micro-batch whose first sample is at position `first`."""
        self._seed(splitmix(self._batch ^ first))

    def _seed(self, seed: int) -> None:
        for generator in self.seeded:
            generator.seed(seed)


class SharedSampleSeeds(SampleSeeds):
    """The dice of a process that also uses its generators for other things: a loop that fetches itself (0 workers)."""

    def __init__(self, key: int) -> None:
        super().__init__(key, generators())
        self._drawn: list[Generator] | None = []  # generators used in the first batch; None after it
        self._fresh: list[tuple[Generator, Any]] = []
        self._listen([])

    def fetch(self, take: Callable[[], Any], repeat: Callable[[], None]) -> Any:
        """`take()` fetches a micro-batch, and the same one again after `repeat()`. The loop's random state is kept."""
        if self._drawn is not None:
            return self._first_fetch(take)
        marks = list(map(_value, self._marks))
        if marks != self._seen:  # the loop has drawn
            self._seen, self._before = marks, [one.words.copy() for one in self._quiet]
        batch = self._seeded_fetch(take) if self.seeded else take()
        if list(map(_value, self._marks)) == marks:
            return batch
        self._wake(marks)
        repeat()
        return self.fetch(take, repeat)

    def _first_fetch(self, take: Callable[[], Any]) -> Any:
        assert self._drawn is not None
        batch = self._seeded_fetch(take)
        quiet = [one for one in self.seeded if one not in self._drawn]
        self.seeded, self._drawn = self._drawn, None
        self._listen(quiet)
        return batch

    def _seeded_fetch(self, take: Callable[[], Any]) -> Any:
        saved = [(one, one.save()) for one in self.seeded]
        try:
            return take()
        finally:
            if self._drawn is not None:
                self._note(self._drawn)
            for one, state in saved:
                one.restore(state)

    def _listen(self, quiet: list[Generator]) -> None:
        """Observe the generators that are not seeded. `_before`: their states when `_marks` were `_seen`."""
        self._quiet, self._marks = quiet, [one.words.mark for one in quiet]
        self._seen, self._before = [mark.value for mark in self._marks], [one.words.copy() for one in quiet]

    def _wake(self, marks: list[Any]) -> None:
        """Restore the generators that were drawn from although they were not seeded, and seed them from now on."""
        still: list[Generator] = []
        for one, mark, before in zip(self._quiet, marks, self._before, strict=True):
            if one.words.mark.value == mark:
                still.append(one)
                continue
            one.restore(before)
            self.seeded.append(one)
        self._listen(still)

    def _seed(self, seed: int) -> None:
        if self._drawn is None:
            return super()._seed(seed)
        self._note(self._drawn)
        super()._seed(seed)
        self._fresh = [(one, one.words.mark.value) for one in self.seeded]

    def _note(self, drawn: list[Generator]) -> None:
        """Add the generators that were drawn from since they were last seeded."""
        drawn += [one for one, mark in self._fresh if one not in drawn and one.words.mark.value != mark]


class SeededIds(list[int]):
    """The ids of one micro-batch. Taking one id out seeds the generators for its sample.

    When it is sent to a DataLoader worker, it gets the dice of that process.
    """

    __slots__ = ("dice", "first")

    def __init__(self, ids: list[int], first: int, dice: SampleSeeds) -> None:
        super().__init__(ids)
        self.first, self.dice = first, dice

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(super().__iter__()):
            self.dice.for_sample(self.first + number)
            yield index

    def __reduce__(self) -> tuple[Callable[..., SeededIds], tuple[list[int], int, int]]:
        return _arrived, (self[:], self.first, self.dice.key)


class PickedArray(np.ndarray[Any, Any]):
    """`SeededIds` for a dataset that takes entire micro-batches. A worker receives a plain array."""

    first: int
    key: int

    @staticmethod
    def of(ids: Indices, first: int, key: int) -> PickedArray:
        """`ids`, not copied."""
        made: PickedArray = cast(Any, ids).view(PickedArray)
        made.first, made.key = first, key
        return made

    def __reduce__(self) -> Any:
        return _arrived_array, (np.asarray(self), self.first, self.key)


_worker_dice: dict[int, SampleSeeds] = {}


def _dice_here(key: int) -> SampleSeeds:
    if key not in _worker_dice:
        _worker_dice[key] = SampleSeeds(key, generators())
    return _worker_dice[key]


def _arrived(ids: list[int], first: int, key: int) -> SeededIds:
    """A worker unpickles its next task right before the fetch: the only moment where `__getitems__` can be seeded."""
    dice = _dice_here(key)
    dice.for_batch(first)
    return SeededIds(ids, first, dice)


def _arrived_array(ids: Indices, first: int, key: int) -> Indices:
    _dice_here(key).for_batch(first)
    return ids
