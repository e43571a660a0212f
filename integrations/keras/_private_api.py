"""The parts of Keras that have no public name. One function each, each with a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from dlrover_hooks.errors import UsageError


def callbacks_beside() -> list[Any]:
    """All callbacks of the `CallbackList` that calls the caller. It gives them no reference to itself."""
    caller = sys._getframe(2).f_locals.get("self")
    return list(caller.callbacks) if isinstance(caller, keras.callbacks.CallbackList) else []


def set_epoch_length(batches: int) -> None:
    """Change the number of batches in the epoch of the `EpochIterator` that calls a `PyDataset`'s `on_epoch_begin`,
    which calls this function.

    It reads the number once, before `on_train_begin`, and uses it after `on_epoch_begin`. With its old number an epoch
    that is resumed in the middle would end by running out of data: with a warning, and on torch with other random
    numbers in the next epoch.
    """
    iterator: Any = sys._getframe(3).f_locals.get("self")
    if hasattr(iterator, "data_adapter") and hasattr(iterator, "_num_batches"):
        iterator._num_batches = batches


_ENDLESS = 2**62


def serve(batches: Callable[[], Iterator[Any]]) -> Any:
    """Let the `EpochIterator` that calls a `PyDataset`'s `on_epoch_begin`, which calls this function, read `batches()`
    until `end_epoch`. Returns the iterator.

    A `PyDataset` cannot end an epoch of unknown length, and a generator would be read once for all epochs.
    """
    adapter: Any = sys._getframe(2).f_locals.get("self")
    iterator: Any = sys._getframe(3).f_locals.get("self")
    if iterator.steps_per_epoch:
        raise UsageError(
            "steps_per_epoch with leased shards: an epoch ends when all its samples are done",
            hint="leave steps_per_epoch out",
        )
    adapter._finite_generator = adapter._infinite_generator = lambda: map(adapter._standardize_batch, batches())
    iterator._num_batches = _ENDLESS
    return iterator


def end_epoch(iterator: Any) -> None:
    """The batches that the `EpochIterator` has begun are all of its epoch."""
    iterator._num_batches = iterator._steps_seen


def build(model: keras.Model, batch: Any) -> None:
    """Create the variables of model, optimizer and metrics if `fit` has not: on TensorFlow its first step does.

    Args:
        model: a compiled model.
        batch: as `PyDataset.__getitem__` returns it.
    """
    model._symbolic_build(data_batch=batch)


def version(variable: Any) -> int:
    """Torch's count of changes of the variable's value in place. Torch backend only."""
    return variable.value._version


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Let the `fit` that has called `on_train_begin` start with `epoch`; None: with its `initial_epoch`.

    Keras' own `BackupAndRestore` does the same.
    """
    model._initial_epoch = epoch


class Shuffle(NamedTuple):
    """A shuffle of a `tf.data.Dataset`. `each_time`: in another order in each iteration. `cached`: by `cache`."""

    seeds: tuple[int, int]
    each_time: bool
    cached: bool


def shuffles(dataset: Any, cached: bool = False) -> list[Shuffle]:
    """Those of a `tf.data.Dataset` and of its inputs, as far as they can be found."""
    cached = cached or type(dataset).__name__ == "CacheDataset"
    found = [one for below in dataset._inputs() for one in shuffles(below, cached)]
    if type(dataset).__name__ == "_ShuffleDataset":
        seeds = int(dataset._seed), int(dataset._seed2)
        found.append(Shuffle(seeds, bool(dataset._reshuffle_each_iteration), cached))
    return found
