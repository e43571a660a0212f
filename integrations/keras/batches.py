"""The training data of `fit`: a `PyDataset` that serves this rank's batches from the position of the checkpoint on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np

from dlrover_hooks.data.feistel import Indices
from dlrover_hooks.data.step_indices import StepIndices
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.keras import _private_api as private


class IndexedSource(Protocol):
    """Data that can be read at any place. `count`: its samples (batches, if it is a dataset of batches)."""

    count: int

    def take(self, ids: Indices) -> Any:
        """The batch of these samples, in the form that `PyDataset.__getitem__` returns."""
        ...


class ArraySource:
    """Arrays, or nested lists, tuples and dicts of arrays, with the samples along their first axis."""

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        if y is None and sample_weight is not None:
            raise UsageError("sample_weight was given without y", hint="el.data(x, y, sample_weight)")
        self._parts = keras.tree.map_structure(_array, parts)
        lengths = {len(one) for one in keras.tree.flatten(self._parts)}
        if len(lengths) != 1:
            raise UsageError(f"the arrays have {sorted(lengths)} samples", hint="give as many of each")
        self.count = lengths.pop()

    def take(self, ids: Indices) -> Any:
        return keras.tree.map_structure(lambda array: array[ids], self._parts)


class BatchSource:
    """A `PyDataset` of a known number of batches. Batch `i` must be the same one in every epoch."""

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self._dataset = dataset
        count = dataset.num_batches
        if count is None:
            raise UsageError(
                "the PyDataset is endless (num_batches is None): its epochs have no positions to resume at",
                hint="let num_batches return the number of batches in an epoch",
            )
        self.count = int(count)

    def take(self, ids: Indices) -> Any:
        return self._dataset[int(ids[0])]


class ElasticBatches(keras.utils.PyDataset):
    """What `ElasticCallback.data` returns, for `fit`.

    Args:
        source: the data.
        steps: which samples belong to which step.
        before_fetch: called before a batch is read, by the thread that reads it.
    """

    def __init__(self, source: IndexedSource, steps: StepIndices, before_fetch: Callable[[], object]) -> None:
        super().__init__()  # one worker: the batches are requested in order
        self.steps = steps
        self._source, self._before_fetch = source, before_fetch
        self._fetched, self._left = 0, steps.steps

    @property
    def num_batches(self) -> int:
        """Batches of the current epoch: fewer than `steps.steps` in one that is resumed in the middle."""
        return self._left

    @property
    def requested(self) -> bool:
        """True if a batch of the current epoch was requested."""
        return self._fetched > 0

    def __getitem__(self, index: int) -> Any:
        del index  # `fit` shuffles the indices by default; the order is that of `steps`
        number = self._fetched
        self._fetched += 1
        self._before_fetch()
        return self._source.take(self.steps.indices(number))

    def first(self) -> Any:
        """The batch at the position, without counting it."""
        return self._source.take(self.steps.indices(0))

    def on_epoch_begin(self) -> None:
        """Called by Keras before the first batch of an epoch is requested."""
        self._fetched = 0
        self.steps.begin()
        self._left = self.steps.left
        private.set_epoch_length(self._left)  # Keras has read it once, before the position was known

    def on_epoch_end(self) -> None:
        """Called by Keras after the last batch, and once before the training."""
        self._fetched, self._left = 0, self.steps.steps
        private.set_epoch_length(self._left)


def _array(value: Any) -> Any:
    """`value` as NumPy array; memory maps stay on disk."""
    return value if isinstance(value, np.ndarray) else keras.ops.convert_to_numpy(value)
