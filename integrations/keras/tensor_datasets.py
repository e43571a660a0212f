"""Epochs of a finite `tf.data.Dataset`. TensorFlow is not imported: the dataset has brought it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import keras

from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.keras import _private_api as private

_INFINITE, _UNKNOWN = -1, -2

_read_before: WeakSet[Any] = WeakSet()
"""Datasets with another order in each iteration, of which iterations were used up."""


def is_tensor_dataset(x: Any) -> bool:
    """True for a `tf.data.Dataset`."""
    return hasattr(x, "as_numpy_iterator") and hasattr(x, "cardinality")


class DatasetReader:
    """An `EpochReader` of a `tf.data.Dataset` of batches: epoch `e` is its iteration `e + 1`.

    A dataset that is shuffled with a seed has another order in each iteration, and the number of iterations decides
    which. Iteration 0 is the look at its shapes. What cannot be found out about a dataset is not checked: functions of
    `map` that draw random numbers, orders that depend on the speed of threads.

    Raises:
        UsageError: it is infinite, of unknown length without `batches`, or of another order in each process.
    """

    name = "the tf.data dataset"

    def __init__(self, dataset: Any, batches: int | None) -> None:
        self._dataset, self._iterations = dataset, 0
        self.count = _length(dataset, batches)
        self.order = _order(dataset)

    def look(self) -> Iterator[Any]:
        return self._next_iteration(0)

    def open(self, epoch: int, at: int) -> Iterator[Any]:
        while self._iterations <= epoch:
            self._next_iteration(0)
        return self._next_iteration(at)

    def _next_iteration(self, at: int) -> Iterator[Any]:
        self._iterations += 1
        rest = self._dataset.skip(at) if at else self._dataset
        return iter(rest) if keras.backend.backend() == "tensorflow" else rest.as_numpy_iterator()


def _length(dataset: Any, batches: int | None) -> int:
    found = int(dataset.cardinality())
    if found == _INFINITE:
        raise UsageError("the tf.data dataset is infinite: its epochs have no end", hint="leave .repeat() out")
    if found == _UNKNOWN and batches is None:
        raise UsageError(
            "the tf.data dataset does not know how many batches it has (its cardinality is unknown)",
            hint="el.data(dataset, batches=N)",
        )
    if found == _UNKNOWN and batches is not None:
        found = batches
    if found < 1 or batches not in (None, found):
        raise UsageError(f"the tf.data dataset has {found} batches, and batches={batches}", hint="leave batches= out")
    return found


def _order(dataset: Any) -> list[list[int]]:
    """The seeds of its shuffles: those of the first start must be those of every start."""
    if dataset.options().deterministic is False:
        raise UsageError(
            "the tf.data dataset has options().deterministic=False: its order is another one each time",
            hint="leave the option out",
        )
    shuffles = private.shuffles(dataset)
    for one in shuffles:
        if one.seeds == (0, 0):
            raise UsageError(
                "the tf.data dataset is shuffled without a seed: its order is another one in each process",
                hint="dataset.shuffle(size, seed=1), or keras.utils.set_random_seed(1) before it is made",
            )
        if one.each_time and one.cached:
            raise UsageError(
                "the tf.data dataset is shuffled before it is cached: its order is that of the first complete epoch",
                hint="dataset.cache().shuffle(...), or shuffle(..., reshuffle_each_iteration=False)",
            )
    if any(one.each_time for one in shuffles):
        if dataset in _read_before:
            raise UsageError(
                "the tf.data dataset was read before in this process: each iteration shuffles it in another order",
                hint="make the dataset again for each fit",
            )
        _read_before.add(dataset)
    return [list(one.seeds) for one in shuffles]
