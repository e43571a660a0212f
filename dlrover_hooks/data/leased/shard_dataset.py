"""`ShardDataset`: a dataset that the master lends out in shards, to workers of any number and speed.

    loader = elastic_loader(DataLoader(ShardDataset(dataset), batch_size=32, num_workers=2), optimizer=optimizer)

A shard is a range of positions of the endless shuffled order; only sample numbers are sent, never samples. The second
part of this file runs in DataLoader workers: they get the numbers of one batch and return its samples. After a failure
they return the samples before it and the reason.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import msgspec

from dlrover_hooks.data.leased.sources import RecordSource, Stream, as_source
from dlrover_hooks.data.order import Order
from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.protocol import Partition

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    _Rows = Dataset[Any]
else:
    _Rows = object  # torch checks no dataset's class, and Keras leases shards without torch

_TRACE_CHARS = 4000
_REASON_CHARS = 500
_STAND_INS = 32


class ShardDataset(_Rows):
    """Wraps a dataset: its samples are leased from the master instead of being split among ranks.

    Every sample is trained on once, by any free worker; what a dead worker had not acknowledged is lent out again. Make
    a loader of it with `elastic_loader(DataLoader(...))`; it cannot be read in another way.

    Args:
        dataset: a map-style dataset, or one of `dlrover_hooks.data.leased.sources`: TextRecords, Files, Table, Stream.
        name: of the ledger; a job may have several.
        shard_size: samples of a lease; "auto": about five seconds of work of the requesting worker.
        epochs: how often each sample is used. None: as in `loader.epochs(n)`, else 1. A stream has one.
        shuffle, seed: another order in every epoch. A stream is never shuffled.
        lookahead: leases fetched during the previous one; if they are short, up to 0.25 s of work. 0: none.
        synchronous: True: all ranks of torch.distributed make the same number of steps; one that has no data repeats
            its last batch with weight 0. None: True if there is a process group of more than one rank.
        on_error: at the end of an epoch in which samples could not be read, "raise" or "warn". None: from the
            environment, else "raise".
        patience_s: while the master is away, the present leases are used up; then training waits for this long.

    Raises UsageError for what cannot be lent out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str = "train",
        shard_size: int | Literal["auto"] = "auto",
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        lookahead: int = 1,
        synchronous: bool | None = None,
        on_error: Literal["raise", "warn"] | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self.source = as_source(dataset)
        self.name, self.epochs, self.seed, self.lookahead = name, epochs, seed, lookahead
        self.shard_size = 0 if shard_size == "auto" else shard_size
        self.shuffle = shuffle and not isinstance(self.source, Stream)
        self.synchronous, self.on_error, self.patience_s = synchronous, on_error, patience_s
        _check(self)

    def __len__(self) -> int:
        """Samples of an epoch, over all workers."""
        if isinstance(self.source, Stream):
            _refuse()
        return len(self.source)

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse()

    def __getitems__(self, indices: Any) -> NoReturn:
        _refuse()

    @property
    def order(self) -> Order | None:
        """The order of an epoch; None for a stream."""
        return None if isinstance(self.source, Stream) else Order(len(self), self.seed, self.shuffle)

    @property
    def fingerprint(self) -> str:
        """Everything that determines which sample is at a position."""
        order = self.order
        how = "" if order is None else f", {order.algo} seed {self.seed if self.shuffle else 0}"
        return self.source.fingerprint() + how

    def partitions(self, epochs: int) -> tuple[Partition, ...]:
        """What the ledger lends out: positions of all epochs in sequence, or the stream's own partitions."""
        if isinstance(self.source, Stream):
            return self.source.partitions
        return (Partition(end=len(self) * epochs),)


def stand_ins(dataset: ShardDataset) -> Iterator[Pick]:
    """Single samples from all over the data, since other samples of an unreadable one's file may be unreadable too."""
    if isinstance(dataset.source, Stream):
        for part in dataset.source.partitions:
            if part.begin != part.end:
                yield Pick(None, part.name, part.begin, part.begin + 1)
        return
    n, tries = len(dataset), min(len(dataset), _STAND_INS)
    for number in range(tries):
        yield Pick([number * n // tries])


def _refuse() -> NoReturn:
    raise UsageError(
        "a ShardDataset has no samples of its own: which ones this worker trains on is for the master to say",
        hint="loader = elastic_loader(DataLoader(ShardDataset(...), batch_size=...), optimizer=optimizer)",
    )


def _check(dataset: ShardDataset) -> None:
    if not isinstance(dataset.source, Stream) and len(dataset) < 1:
        raise UsageError(f"dataset {dataset.name!r} has no samples", hint="give a dataset with at least one sample")
    for name, least in (("shard_size", 0), ("lookahead", 0), ("seed", 0)):
        if getattr(dataset, name) < least:
            raise UsageError(f"{name}={getattr(dataset, name)} must be at least {least}")
    if dataset.epochs is not None and dataset.epochs < 1:
        raise UsageError(f"epochs={dataset.epochs} must be at least 1")
    if isinstance(dataset.source, Stream) and dataset.epochs not in (None, 1):
        raise UsageError(f"a stream has one epoch, not {dataset.epochs}")
    if dataset.on_error not in (None, "raise", "warn"):
        raise UsageError(f"on_error={dataset.on_error!r} is unknown", hint='use "raise" or "warn"')


# ---- in DataLoader workers ------------------------------------------------------------------------------------------


class Pick(msgspec.Struct, frozen=True, gc=False):
    """One batch to read: `numbers` of a bounded source, or offsets [lo, hi) of `partition`. Empty: none for now."""

    numbers: list[int] | None = None
    partition: str = ""
    lo: int = 0
    hi: int = 0


class Read(NamedTuple):
    """One batch as far as it could be read: the first `good` samples, collated; then `bad` ones failed.

    `end`: the end of the stream's partition, if it was reached. A NamedTuple, so that pin_memory reaches its tensors.
    """

    batch: Any = None
    good: int = 0
    bad: int = 0
    reason: str = ""
    trace: str = ""
    end: int | None = None


_WHOLE = Read()


class FetchedSamples(NamedTuple):
    """From `Reading` to `Collated` if a batch is not complete: its first samples, and the reason why it ended."""

    samples: Sequence[Any]
    read: Read


class Reading:
    """The inner DataLoader's dataset. A sample that raises ends its batch, but the samples before it are used."""

    def __init__(self, source: RecordSource | Stream) -> None:
        self.source = source

    def __len__(self) -> int:
        raise TypeError("how many batches there are depends on the other workers")

    def __getitems__(self, pick: Pick) -> Sequence[Any] | FetchedSamples:
        """The samples of a batch; after a failure those before it, with the reason."""
        if isinstance(self.source, Stream):
            return self._offsets(self.source, pick)
        numbers, source = pick.numbers or [], self.source
        try:
            found: Sequence[Any] = source.__getitems__(numbers) if numbers else []
        except Exception:
            return _one_by_one(numbers, source.__getitem__, source.place)
        if len(found) != len(numbers):
            raise UsageError(f"the dataset gave {len(found)} samples for {len(numbers)} numbers")
        return found

    def _offsets(self, stream: Stream, pick: Pick) -> Sequence[Any] | FetchedSamples:
        partition, lo, hi = pick.partition, pick.lo, pick.hi
        try:
            found: Sequence[Any] = stream.read(partition, lo, hi) if lo < hi else []
        except Exception:
            return _one_by_one(
                list(range(lo, hi)),
                lambda offset: stream.read(partition, offset, offset + 1)[0],
                lambda offset: stream.place(partition, offset),
            )
        if len(found) > hi - lo:
            raise UsageError(f"the stream gave {len(found)} records for offsets [{lo}, {hi}) of {partition!r}")
        if len(found) == hi - lo:
            return found
        end = lo + len(found) if found else _end_before(stream, partition, lo)
        return FetchedSamples(found, Read(end=end))


class Collated:
    """The user's collate_fn over the samples from `Reading`. If it raises, the entire batch has failed."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, found: Sequence[Any] | FetchedSamples) -> Read:
        samples, read = found if isinstance(found, FetchedSamples) else (found, _WHOLE)
        if not samples:
            return read
        try:
            batch = self.collate(samples)
        except HooksError:
            raise
        except Exception as error:
            return _failure("collate_fn", error, len(samples))
        return Read(batch, len(samples)) if read is _WHOLE else read._replace(batch=batch, good=len(samples))


def _end_before(stream: Stream, partition: str, hi: int) -> int:
    """The end of a partition without records from `hi` on. It may be before `hi`, where another worker still reads."""
    lo = next(part.begin for part in stream.partitions if part.name == partition)
    while lo < hi:
        middle = (lo + hi) // 2
        if len(stream.read(partition, middle, middle + 1)):
            lo = middle + 1
        else:
            hi = middle
    return lo


def _one_by_one(numbers: list[int], get: Callable[[int], Any], place: Callable[[int], str]) -> FetchedSamples:
    """All samples before the first one that raises."""
    samples: list[Any] = []
    for number in numbers:
        try:
            samples.append(get(number))
        except HooksError:
            raise
        except Exception as error:
            return FetchedSamples(samples, _failure(place(number), error, 1))
    return FetchedSamples(samples, _WHOLE)


def _failure(where: str, error: Exception, count: int) -> Read:
    """Why `count` samples could not be read. HooksErrors (such as changed data) are raised instead."""
    reason = f"{where}: {type(error).__name__}: {error}"[:_REASON_CHARS]
    return Read(bad=count, reason=reason, trace="".join(traceback.format_exception(error))[-_TRACE_CHARS:])
