"""Training data that the master lends out in shards: a batch counts once it is in the model, not once it is fetched.

All calls about leases are made on the training thread: the next batch is read after each step. So it is known then
whether the epoch is over, although the number of its batches is not known beforehand. Keras takes the batches out of a
queue, on TensorFlow in a thread of its own.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from dlrover_hooks.data.leased.applied_ranges import AppliedRanges, LeasePart
from dlrover_hooks.data.leased.ledger_connection import LedgerClient, LedgerConnection
from dlrover_hooks.data.leased.loader_feed import LoaderFeed
from dlrover_hooks.data.leased.quarantine import tell_quarantined
from dlrover_hooks.data.leased.shard_dataset import Collated, Pick, Reading, ShardDataset, stand_ins
from dlrover_hooks.data.leased.sources import Stream
from dlrover_hooks.errors import DataMismatch, ShardsFailed, UsageError
from dlrover_hooks.integrations.keras import _private_api as private
from dlrover_hooks.integrations.keras.batches import PEEKED, ElasticBatches, Fetches

if TYPE_CHECKING:
    from dlrover_hooks.data.leased.lease_client import LeaseCaller, LeaseClient
    from dlrover_hooks.session import Session

VERSION = 1
_END = object()
_LOOK_S = 1.0


class BatchQueue:
    """From the training thread to the thread that reads for Keras; they may be the same one."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._owner = threading.current_thread()

    def put(self, batch: Any) -> None:
        self._batches.put(batch)

    def close(self) -> None:
        """No batch follows. Idempotent; any thread."""
        self._batches.put(_END)

    def batches(self, more: Callable[[], bool]) -> Iterator[Any]:
        """Until `close`, or the end of the thread that puts. On that thread `more` puts a batch if there is none."""
        here = threading.current_thread() is self._owner
        while True:
            try:
                batch = self._batches.get(block=not here, timeout=_LOOK_S)
            except queue.Empty:
                if more() if here else self._owner.is_alive():
                    continue
                return
            if batch is _END:
                return
            yield batch


class LeasedBatches(ElasticBatches):
    """What `ElasticCallback.data` returns for a `ShardDataset`. Training thread only, except `BatchQueue.batches`.

    Args:
        dataset: its samples are what a batch of Keras is made of: `x`, `(x, y)`, `(x, y, sample_weight)` or dicts.
        batch_size: samples of a batch; the last one of a lease may be shorter.
        rank, world_size, fetches: as of `ElasticBatches`.

    Raises:
        UsageError: there are several workers.
    """

    def __init__(self, dataset: ShardDataset, batch_size: int, rank: int, world_size: int, fetches: Fetches) -> None:
        super().__init__(rank, world_size, fetches)
        if world_size > 1:
            raise UsageError(
                f"{world_size} workers were started: with Keras, shards are leased to one worker",
                hint="give arrays or a PyDataset, of which each worker takes its rows; or lease in a loop of torch, "
                "with dlrover_hooks.elastic_loader",
            )
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} must be at least 1")
        self._dataset, self._batch_size, self._epochs = dataset, batch_size, 1
        self._reading, self._collated = Reading(dataset.source), Collated(stacked)
        self._peeked = list(itertools.islice(self._looks(), PEEKED))
        if not self._peeked:
            raise ShardsFailed(f"dataset {dataset.name!r}: no sample could be read to look at its shape")
        self._tally = AppliedRanges()
        self._epoch, self._within = 0, False
        self._ledger: LedgerClient | None = None
        self._feed: LoaderFeed | None = None
        self._ahead: deque[LeasePart] = deque()
        """Read, but not yet applied: the oldest first."""
        self._queue = BatchQueue()
        self._iterator: Any = None
        self._ends: list[Callable[[], object]] = []

    # ---- Keras ------------------------------------------------------------------------------------------------------

    @property
    def num_batches(self) -> Any:
        """An estimate, for the progress bar: leases that end with a short batch make more. None for a stream."""
        stream = isinstance(self._dataset.source, Stream)
        return None if stream else -(-len(self._dataset) // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        """A batch of the epoch's order, if the callback is disabled; else one for its shape."""
        order = self._dataset.order
        if not self.training or self._ledger is not None or order is None:
            return self._peeked[index % len(self._peeked)]
        positions = np.arange(index * self._batch_size, min((index + 1) * self._batch_size, order.n))
        return self._collated(self._reading.__getitems__(Pick(order.indices(0, positions).tolist()))).batch

    def first(self) -> Any:
        return self._peeked[0]

    def on_epoch_begin(self) -> None:
        """Called by Keras before the first batch of an epoch is requested."""
        super().on_epoch_begin()
        if self._ledger is None:
            return
        self._leave()
        self._queue = BatchQueue()
        self._iterator = private.serve(self._served)
        borrower: LeaseClient = self._ledger.borrow(self._epoch)
        self._feed = LoaderFeed(borrower, self._dataset.order, self._batch_size)
        self._feed.rows = (self._collated(self._reading.__getitems__(pick)) for pick in self._feed.picks())
        self._ends = [weakref.finalize(self, borrower.close), weakref.finalize(self, self._queue.close)]
        self.look_ahead()

    def _served(self) -> Iterator[Any]:
        for batch in self._queue.batches(self._more):
            self._fetched += 1
            self._fetches.begin()
            yield batch

    # ---- the callback -----------------------------------------------------------------------------------------------

    @property
    def within_epoch(self) -> bool:
        return self._within

    def attach(self, session: Session, epochs: int) -> None:
        stream = isinstance(self._dataset.source, Stream)
        self._epochs = self._dataset.epochs or (1 if stream else epochs)
        if self._epochs < epochs:
            raise UsageError(
                f"dataset {self._dataset.name!r} is lent out for {self._epochs} epochs, not {epochs}",
                hint=f"fit(..., epochs={self._epochs})" if stream else f"ShardDataset(..., epochs={epochs})",
            )
        session.lease(self._dataset.name, self)

    def applied(self, batch: int) -> int:
        made = batch + 1 - self._applied
        for _ in range(made):
            self._tally.received(self._ahead.popleft())
        self._applied, self._within = batch + 1, True
        return made

    def look_ahead(self) -> None:
        """Read the next batch, or end the epoch. Call it after the last step was marked.

        Waits while the master has nothing: until then what is applied here is acknowledged.
        """
        if self._feed is not None and not self._ahead and not self._pull(self._acknowledged):
            self._over(self._feed)
        self._fetches.end()

    def end(self) -> None:
        """The training is over: acknowledge what is applied, give back the rest."""
        self.commit()
        self._leave()

    def _more(self) -> bool:
        """Keras reads further ahead on the training thread. Nothing that waits for what is applied later is read."""
        return self._feed is not None and self._pull(lambda: True)

    def _pull(self, dry: Callable[[], bool]) -> bool:
        assert self._feed is not None
        delivery = self._feed.pull(dry)
        if delivery is not None:
            self._ahead.append(delivery.piece)
            self._queue.put(delivery.batch)
        return delivery is not None

    def _acknowledged(self) -> bool:
        self.commit()
        return False

    def _over(self, feed: LoaderFeed) -> None:
        self._epoch, self._within = self._epoch + 1, False
        private.end_epoch(self._iterator)
        self._leave()
        if feed.borrower.quarantined:
            tell_quarantined(self._dataset, feed.borrower.quarantined)

    def _leave(self) -> None:
        self._feed, ends, self._ends = None, self._ends, []
        self._ahead.clear()
        self._tally.drop()
        for end in ends:
            end()

    # ---- the position in a cut: see `dlrover_hooks.data.session_datasets.Leased` ------------------------------------

    def connect(self, caller: LeaseCaller, job: str, incarnation: str, *, free: bool, rank: int | None = None) -> None:
        """Take leases through `caller` from now on."""
        self._leave()
        line = LedgerConnection(caller, job, incarnation, free, rank or 0)
        self._ledger = LedgerClient(line, self._dataset, self._batch_size, self._epochs)
        self._tally.forget()

    def mark(self) -> None:
        self._tally.mark()

    def commit(self) -> None:
        for held, upto in self._tally.commit():
            if self._feed is not None:
                self._feed.borrower.committed(held, upto)
        if self._feed is not None and self._feed.borrower.twice is not None:
            raise self._feed.borrower.twice  # before anything is saved

    def state_dict(self) -> dict[str, Any]:
        """What is in the model since the attempt began, and what was before."""
        state: dict[str, Any] = {"v": VERSION, "fingerprint": self._dataset.fingerprint, "epoch": self._epoch}
        state["within"] = self._within
        state["own"] = {name: done.encode() for name, done in self._tally.done.items()}
        if self._ledger is not None:
            state["base"] = dict(self._ledger.ledger.done)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the state's epoch. Raises DataMismatch for the state of other data; nothing is changed then."""
        for name, here in (("v", VERSION), ("fingerprint", self._dataset.fingerprint)):
            if state.get(name) != here:
                raise DataMismatch(
                    f"dataset {self._dataset.name!r}: the state has {name}={state.get(name)!r}, here it is {here!r}",
                    hint="give the data, seed and shuffle of the first start, or start over (resume='never')",
                )
        self._epoch, self._within = int(state.get("epoch", 0)), bool(state.get("within", False))

    def _looks(self) -> Iterator[Any]:
        for pick in stand_ins(self._dataset):
            read = self._collated(self._reading.__getitems__(pick))
            if read.good:
                yield read.batch


def stacked(samples: Sequence[Any]) -> Any:
    """A batch: the arrays and numbers of the samples, each along a new first axis."""
    return keras.tree.map_structure(lambda *parts: np.stack([np.asarray(part) for part in parts]), *samples)
