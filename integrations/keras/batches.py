"""The training data of `fit`: a `PyDataset` that serves this rank's batches from the position of the checkpoint on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import keras
import numpy as np

from dlrover_hooks.data.feistel import Indices
from dlrover_hooks.data.session_datasets import DatasetPosition
from dlrover_hooks.data.step_indices import Share, StepIndices, share
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.keras import _private_api as private

if TYPE_CHECKING:
    from dlrover_hooks.session import Session

PLACE = "train"
"""Name of the data in the checkpoint."""
PEEKED = 2
"""Batches from which Keras derives the shapes on TensorFlow, where it cannot ask for any batch."""


class Fetches(NamedTuple):
    """What is called around each read of a batch, by the thread that reads it."""

    begin: Callable[[], bool]
    """Returns whether this is the training thread."""
    end: Callable[[], object]


class IndexedSource(Protocol):
    """Data that can be read at any place. `count`: its samples (batches, if it is a dataset of batches)."""

    count: int

    def take(self, ids: Indices, share_of: Callable[[int], Share]) -> tuple[Any, float]:
        """This rank's rows of the batch of these samples, in the form that `PyDataset.__getitem__` returns.

        Also returned: their weight in the batch. share_of: which of a number of rows are this rank's.
        """
        ...


class ArraySource:
    """Arrays, or nested lists, tuples and dicts of arrays, with the samples along their first axis."""

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        if y is None and sample_weight is not None:
            raise UsageError("sample_weight was given without y", hint="el.data(x, y, sample_weight)")
        arrays = keras.tree.map_structure(_array, parts)
        lengths = {len(one) for one in keras.tree.flatten(arrays)}
        if len(lengths) != 1:
            raise UsageError(f"the arrays have {sorted(lengths)} samples", hint="give as many of each")
        self.count = lengths.pop()
        self._rows = _reader(arrays)

    def take(self, ids: Indices, share_of: Callable[[int], Share]) -> tuple[Any, float]:
        lo, hi, weight = share_of(len(ids))
        return self._rows(ids[lo:hi]), weight


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

    def take(self, ids: Indices, share_of: Callable[[int], Share]) -> tuple[Any, float]:
        return rows_of(self._dataset[int(ids[0])], share_of)


def rows_of(batch: Any, share_of: Callable[[int], Share]) -> tuple[Any, float]:
    """This rank's rows of a whole batch, and their weight in it."""
    lo, hi, weight = share_of(len(keras.tree.flatten(batch)[0]))
    return (batch if weight == 1.0 else keras.tree.map_structure(lambda array: array[lo:hi], batch)), weight


class ElasticBatches(keras.utils.PyDataset):
    """What `ElasticCallback.data` returns, for `fit`.

    Args:
        rank, world_size: of this process.
        fetches: called around each read of a batch.
    """

    weight = 1.0
    """Share of this rank's rows in the batch that was read last."""

    def __init__(self, rank: int, world_size: int, fetches: Fetches) -> None:
        super().__init__()  # one worker: the batches are requested in order
        self.training = False
        """Set by the callback when its training begins."""
        self._rank, self._world_size, self._fetches = rank, world_size, fetches
        self._fetched = self._applied = 0
        """Batches of the current epoch that were requested here, and that were applied here."""

    @property
    def requested(self) -> bool:
        """True if a batch of the current epoch was requested."""
        return self._fetched > 0

    def on_epoch_begin(self) -> None:
        """Called by Keras before the first batch of an epoch is requested."""
        self._fetched = self._applied = 0

    @property
    def within_epoch(self) -> bool:
        """True if the position is in the middle of an epoch."""
        raise NotImplementedError

    def first(self) -> Any:
        """A batch for its shapes, without counting it."""
        raise NotImplementedError

    def attach(self, session: Session, epochs: int) -> None:
        """Make the position part of every cut of `session`, and load the restored one. epochs: of the training.

        Raises UsageError if the data is not that of the first start.
        """
        raise NotImplementedError

    def applied(self, batch: int) -> int:
        """The batches up to number `batch` of this epoch are applied. Returns how many were not before."""
        raise NotImplementedError

    def look_ahead(self) -> None:
        """The last step is marked."""

    def end(self) -> None:
        """The training is over."""


class CountedBatches(ElasticBatches):
    """Batches whose number in an epoch is known. steps: which samples belong to which step."""

    def __init__(self, steps: StepIndices, rank: int, world_size: int, fetches: Fetches) -> None:
        super().__init__(rank, world_size, fetches)
        self.steps = steps
        self._left = 0
        """Batches of the current epoch."""

    @property
    def num_batches(self) -> int:
        """Batches of the current epoch: fewer than in a complete one if it is resumed in the middle."""
        return self.steps.left

    @property
    def within_epoch(self) -> bool:
        return self.steps.within_epoch

    @property
    def position(self) -> DatasetPosition:
        """What a cut holds of the data."""
        return self.steps

    def attach(self, session: Session, epochs: int) -> None:
        del epochs
        saved = session.restored_data(PLACE)
        if saved is not None and saved.get("G") != self.steps.global_batch_size:
            raise UsageError(
                f"batches have {self.steps.global_batch_size} samples, at the first start they had {saved.get('G')}",
                hint="give the batch_size of the first start, or start over (resume='never')",
            )
        session.watch(PLACE, self.position)

    def applied(self, batch: int) -> int:
        made = min(batch + 1, self._left) - self._applied  # `steps_per_execution` batches, or the last few
        for _ in range(made):
            self.steps.on_batch()
        self._applied += made
        return made

    def __getitem__(self, index: int) -> Any:
        del index  # `fit` shuffles the indices by default; the order is that of `steps`
        number = self._fetched
        self._fetched += 1
        batch, self.weight = self._read(number)
        self._fetches.end()
        return batch

    def _read(self, number: int) -> tuple[Any, float]:
        """This rank's rows of batch `number` since the epoch began here, and their weight."""
        raise NotImplementedError

    def _share(self, rows: int) -> Share:
        return share(rows, self._rank, self._world_size)

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.steps.begin()
        self._left = self.steps.left
        private.set_epoch_length(self._left)  # Keras has read it once, before the position was known


class IndexedBatches(CountedBatches):
    """Batches of an `IndexedSource`; the other arguments are those of `CountedBatches`."""

    def __init__(self, source: IndexedSource, steps: StepIndices, rank: int, world_size: int, fetches: Fetches) -> None:
        super().__init__(steps, rank, world_size, fetches)
        self._source = source

    def first(self) -> Any:
        """The batch at the position, without counting it."""
        return self._source.take(self.steps.indices(0), self._share)[0]

    def _read(self, number: int) -> tuple[Any, float]:
        self._fetches.begin()
        return self._source.take(self.steps.indices(number), self._share)


def _reader(arrays: Any) -> Callable[[Indices], Any]:
    """Reads rows of all arrays in this structure. `keras.tree.map_structure` takes as long as the reading itself."""
    if isinstance(arrays, np.ndarray):
        return arrays.__getitem__
    kind: Any = type(arrays)
    if kind is dict:
        named = {name: _reader(one) for name, one in arrays.items()}
        return lambda ids: {name: read(ids) for name, read in named.items()}
    if kind in (list, tuple):
        readers = [_reader(one) for one in arrays]
        return lambda ids: kind([read(ids) for read in readers])
    return lambda ids: keras.tree.map_structure(lambda array: array[ids], arrays)


def _array(value: Any) -> Any:
    """`value` as NumPy array; memory maps stay on disk."""
    return value if isinstance(value, np.ndarray) else keras.ops.convert_to_numpy(value)
