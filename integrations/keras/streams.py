"""Training data that is read from the beginning of each epoch: functions that return an iterator, `tf.data` datasets.

An epoch that is resumed in the middle is read again up to there. What it draws from the global random generators is
drawn again, too: their state at the beginning of the epoch is part of the checkpoint.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from dlrover_hooks import rng
from dlrover_hooks.data.session_datasets import DatasetPosition
from dlrover_hooks.data.step_indices import StepIndices
from dlrover_hooks.errors import DataMismatch, UsageError
from dlrover_hooks.integrations.keras.batches import PEEKED, CountedBatches, Fetches, rows_of
from dlrover_hooks.integrations.keras.tensor_datasets import DatasetReader, is_tensor_dataset

log = logging.getLogger("dlrover_hooks")

_END = object()


class EpochReader(Protocol):
    """Where the batches of an epoch come from. `count`: batches of each epoch. `name`: for errors."""

    count: int
    name: str
    order: Any
    """What else determines the order, to be compared with that of the first start. Plain values."""

    def look(self) -> Iterator[Any]:
        """Some epoch, for the shapes of its batches. Called once, before `open`."""
        ...

    def open(self, epoch: int, at: int) -> Iterator[Any]:
        """The batches of `epoch` from number `at` on."""
        ...


class FunctionReader:
    """A user's function that returns an iterator over the batches of an epoch.

    If it has a parameter `epoch`, it gets the number of the epoch, from 0. Raises UsageError for a function that needs
    other arguments.
    """

    def __init__(self, function: Callable[..., Any], batches: int | None) -> None:
        self.name = f"{getattr(function, '__name__', type(function).__name__)}()"
        if batches is None or batches < 1:
            raise UsageError(
                f"batches={batches}: {self.name} does not say how many batches an epoch has",
                hint="el.data(make_batches, batches=N)",
            )
        self.count, self.order, self._function, self._last = batches, [], function, None
        self._numbered = "epoch" in (found := inspect.signature(function).parameters)
        needed = [name for name, one in found.items() if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
        if set(needed) - {"epoch"}:
            raise UsageError(
                f"{self.name} needs the arguments {', '.join(needed)}",
                hint="give a function without arguments, or with one that is called epoch",
            )

    def look(self) -> Iterator[Any]:
        return self.open(0, 0)

    def open(self, epoch: int, at: int) -> Iterator[Any]:
        found = self._function(epoch=epoch) if self._numbered else self._function()
        if found is self._last and iter(found) is found:
            raise UsageError(
                f"{self.name} returned the same iterator twice: an epoch cannot be read again from its beginning",
                hint="create the iterator in the function",
            )
        self._last = found
        return dropped(iter(found), at)


def dropped(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """`batches` without the first `count`, which are read now."""
    next(itertools.islice(batches, count, count), None)
    return batches


def reader_of(x: Any, batches: int | None) -> EpochReader | None:
    """How to read `x` by epochs; None for data that can be read at any place.

    Raises UsageError for data that can be read only once, and for `batches` where it says nothing.
    """
    if is_tensor_dataset(x):
        return DatasetReader(x, batches)
    if hasattr(x, "__next__") or hasattr(x, "dataset"):
        raise UsageError(
            f"{type(x).__module__}.{type(x).__qualname__} has no positions to resume at",
            hint="give a function that creates it: el.data(make_batches, batches=N); or arrays, or a "
            "keras.utils.PyDataset whose __getitem__(i) returns batch i",
        )
    if callable(x) and not hasattr(x, "__getitem__"):
        return FunctionReader(x, batches)
    if batches is not None:
        raise UsageError(
            f"batches={batches} beside a {type(x).__name__}, which says itself how long an epoch is",
            hint="leave batches= out; batch_size= is the size of a batch",
        )
    return None


class StreamedBatches(CountedBatches):
    """What `ElasticCallback.data` returns for an `EpochReader`. Keras may read it in a thread, but in order.

    Before the training begins, Keras looks at a few batches for their shapes: it gets those read here, in advance.
    """

    def __init__(self, reader: EpochReader, rank: int, world_size: int, fetches: Fetches) -> None:
        super().__init__(StepIndices(reader.count, 1, shuffle=False), rank, world_size, fetches)
        self._reader = reader
        random = rng.capture()
        self._peeked = list(itertools.islice(reader.look(), min(PEEKED, reader.count)))
        rng.restore(random)
        if not self._peeked:
            raise UsageError(f"{reader.name} returned no batches", hint="return an iterator over the batches")
        self._open: Iterator[Any] = iter(())
        self._next = -1, -1
        """Epoch and number of the next batch of `_open`."""
        self._began: tuple[int, dict[str, Any]] | None = None
        """The epoch opened last, and the random state before it was opened."""

    def first(self) -> Any:
        """A batch, for its shapes."""
        return self._peek(0)[0]

    def _read(self, number: int) -> tuple[Any, float]:
        if not self.training:
            return self._peek(number)
        place = self.steps.epoch, int(self.steps.indices(number)[0])
        drawn_here = self._fetches.begin()
        if not place[1]:
            self._begin(*place)
        elif self._next != place:
            self._read_again(*place, drawn_here)
        return self._rows(self._following(*place))

    # ---- the position in a cut: see `DatasetPosition` ---------------------------------------------------------------

    @property
    def position(self) -> DatasetPosition:
        return self

    def mark(self) -> int:
        return self.steps.mark()

    def commit(self) -> int:
        return self.steps.commit()

    def state_dict(self) -> dict[str, Any]:
        """The position, and the random state at the beginning of its epoch."""
        state = self.steps.state_dict() | {"seeds": self._reader.order}
        return state if self._began is None else state | {"began": {"epoch": self._began[0], "rng": self._began[1]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataMismatch for another number of batches or order, Corrupt for a random state without sense."""
        if state.get("seeds") != self._reader.order:
            raise DataMismatch(
                f"{self._reader.name} is shuffled with the seeds {self._reader.order}, at the first start "
                f"{state.get('seeds')}",
                hint="shuffle with the seed of the first start, or start over (resume='never')",
            )
        self.steps.load_state_dict(state)
        self._next, self._began = (-1, -1), None
        if "began" in state:
            rng.check(state["began"]["rng"])
            self._began = int(state["began"]["epoch"]), state["began"]["rng"]

    # ---- within -----------------------------------------------------------------------------------------------------

    def _peek(self, number: int) -> tuple[Any, float]:
        if number >= len(self._peeked):
            raise UsageError(
                f"the batches of {self._reader.name} are read without their callback",
                hint="model.fit(el.data(...), callbacks=[el])",
            )
        return self._rows(self._peeked[number])

    def _rows(self, batch: Any) -> tuple[Any, float]:
        batch = batch if isinstance(batch, (tuple, list, dict, np.ndarray)) else (batch,)
        return rows_of(batch, self._share) if self._world_size > 1 else (batch, 1.0)

    def _begin(self, epoch: int, at: int) -> None:
        self._began = epoch, rng.capture()
        self._open, self._next = self._reader.open(epoch, at), (epoch, at)

    def _read_again(self, epoch: int, at: int, drawn_here: bool) -> None:
        """Read an epoch that was left in the middle, up to there, in the random state in which it began.

        drawn_here: then the state of this thread is that of the cut, and is put back. A thread that reads ahead has
        drawn other numbers than the training thread knew of; there the state that follows from reading again is right.
        """
        log.info("%s: epoch %d continues at batch %d: those before are read again", self._reader.name, epoch, at)
        random = rng.capture()
        if self._began is not None and self._began[0] == epoch:
            rng.restore(self._began[1])
        self._begin(epoch, at)
        if drawn_here:
            rng.restore(random)

    def _following(self, epoch: int, at: int) -> Any:
        batch = next(self._open, _END)
        if batch is _END:
            raise UsageError(
                f"{self._reader.name} has {at} batches in epoch {epoch}, not {self._reader.count}",
                hint="each epoch must have as many as batches= says",
            )
        self._next = epoch, at + 1
        if at + 1 == self._reader.count and next(self._open, _END) is not _END:
            raise UsageError(
                f"{self._reader.name} has more than {self._reader.count} batches in epoch {epoch}",
                hint="give their number as batches=; end an endless one with itertools.islice(iterator, N)",
            )
        return batch
