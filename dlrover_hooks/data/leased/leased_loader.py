"""`LeasedLoader`: what `elastic_loader` makes of a DataLoader over a `ShardDataset`.

It feeds the DataLoader with batches of this worker's leases, and acknowledges what is in the model: the optimizer's
step marks, the next request of a batch commits (the step boundary), a background thread sends the acknowledgement.
The number of batches of a worker depends on its speed; all workers together get every sample once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from dlrover_hooks.data.leased import step_agreement
from dlrover_hooks.data.leased.applied_ranges import AppliedRanges
from dlrover_hooks.data.leased.lease_client import LeaseCaller, LeaseClient
from dlrover_hooks.data.leased.ledger_connection import LedgerClient, LedgerConnection, hold, let_go, own_line
from dlrover_hooks.data.leased.loader_feed import Delivery, FeedSampler, LoaderFeed, shut_down, with_picks
from dlrover_hooks.data.leased.loader_preconditions import checked
from dlrover_hooks.data.leased.quarantine import tell_quarantined
from dlrover_hooks.data.leased.shard_dataset import Read, ShardDataset, stand_ins
from dlrover_hooks.data.leased.sources import Stream
from dlrover_hooks.data.leased.step_agreement import Agreement
from dlrover_hooks.data.optimizer_step_hook import mark_on_step
from dlrover_hooks.errors import DataMismatch, HooksError, ShardsFailed, UsageError

log = logging.getLogger(__name__)
VERSION = 1
_AGAIN_S = 1.0


class LeasedLoader:
    """A DataLoader over leased shards. Training thread only. Other attributes are the inner DataLoader's.

    `before_batch`: as of `ElasticLoader`. `after_batch`: functions called before the loop receives a batch, with
    whether all ranks make their steps together. Without a session it connects to the master of the environment
    (DLROVER_HOOKS_MASTER, DLROVER_HOOKS_JOB), or keeps the ledger itself if there is none. Raises UsageError for a
    loader whose sampler, batch sampler or drop_last contradicts the leases.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = checked(loader)
        self.name, self.batch_size = self.dataset.name, int(loader.batch_size or 1)
        self.before_batch: list[Callable[[], object]] = []
        self.after_batch: list[Callable[[bool], object]] = []
        self.weight = 1.0
        """Of this rank's gradient in the current step, for a SUM over ranks (`dlrover_hooks.pytorch.ddp_exactness`)."""
        self.loss_scale = 1.0
        self._picks = FeedSampler()
        self.inner = with_picks(loader, self.dataset, self._picks)
        self._marks: list[RemovableHandle] = []
        self._holder: LedgerClient | None = None
        self._own: LedgerConnection | None = None
        self._borrower: LeaseClient | None = None
        self._live: object | None = None
        self._agreement: Agreement | None = None
        self._epochs, self._epoch, self._begun = self.dataset.epochs, 0, False
        self.tally = AppliedRanges()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    # ---- the master -------------------------------------------------------------------------------------------------

    def connect(self, caller: LeaseCaller, job: str, incarnation: str, *, free: bool, rank: int | None = None) -> None:
        """Take leases through `caller` from now on. Call it once for each attempt, before its first batch.

        This forgets what was done in the previous attempt: the master's ledger was rolled back to the checkpoint.
        """
        self.close()
        self._holder = self._at(
            LedgerConnection(caller, job, incarnation, free, step_agreement.rank() if rank is None else rank)
        )
        self.tally.forget()

    def _at(self, line: LedgerConnection) -> LedgerClient:
        return LedgerClient(line, self.dataset, self.batch_size, self._epochs or 1)

    @property
    def holder(self) -> LedgerClient:
        """Access to the ledger; through an own connection if `connect` was not called."""
        if self._holder is None:
            self._own = own_line(self.dataset, self)
            self._holder = self._at(self._own)
            self._holder.open()  # register before the liveness connection is opened
            hold(self._own)
        return self._holder

    # ---- iterating --------------------------------------------------------------------------------------------------

    def epochs(self, n: int | None = None) -> Iterator[int]:
        """The remaining epochs of n (None: of the dataset's), without those that other workers have finished.

        Iterate the loader once in each. After the last one everything is acknowledged.
        """
        total = self._total(n)
        before = -1
        while (epoch := self._ahead()) < total:
            if epoch == before:
                raise UsageError(f"the body of epochs({total}) did not iterate the loader in epoch {epoch}")
            if self.holder.finished(epoch):
                self._epoch, self._begun = epoch + 1, False
                continue
            before = epoch
            yield epoch
        self.finish()

    def _total(self, n: int | None) -> int:
        if n is not None and self._epochs is None and (self._holder is None or not self._holder.opened):
            self._epochs = n
            if self._holder is not None:
                self._holder.epochs = n
        total = self._epochs or 1
        if n is not None and n > total:
            raise UsageError(
                f"dataset {self.name!r} is lent out for {total} epochs, not {n}", hint=f"ShardDataset(..., epochs={n})"
            )
        return total if n is None else n

    def _ahead(self) -> int:
        """The epoch of the next iterator."""
        return self._epoch + self._begun

    def __iter__(self) -> Iterator[Any]:
        """Batches of an epoch until every sample of it is done on any worker. A newer iterator ends an older one."""
        self.commit()  # the loop requests more, so the last step is over
        self._leave()
        if self._begun:
            log.warning("dataset %r: epoch %d was left in the middle: the next one begins", self.name, self._epoch)
        epoch, total = self._ahead(), self._epochs or 1
        if epoch >= total and not isinstance(self.dataset.source, Stream):
            raise UsageError(
                f"dataset {self.name!r} is lent out for {total} epochs, and they are over",
                hint=f"ShardDataset(..., epochs={epoch + 1}), or `for epoch in loader.epochs(n)`",
            )
        self._epoch, self._begun = (0 if isinstance(self.dataset.source, Stream) else epoch), False
        self._borrower = self.holder.borrow(self._epoch)
        self._borrower_end = weakref.finalize(self, self._borrower.close)
        feed = self._picks.feed = LoaderFeed(self._borrower, self.dataset.order, self.batch_size)
        token = self._live = object()
        return self._steps(feed, token) if self._synchronous() else self._stream(feed, token)

    def _synchronous(self) -> bool:
        wanted, several = self.dataset.synchronous, step_agreement.world_size() > 1
        if wanted and not several:
            log.info("dataset %r: synchronous=True means nothing with one rank", self.name)
        return several and wanted is not False

    def _stream(self, feed: LoaderFeed, token: object) -> Iterator[Any]:
        """Batches at this worker's own speed."""
        try:
            self._start(feed)
            pull, leftover, received = feed.pull, self._leftover, self.tally.received
            alone = step_agreement.world_size() == 1
            while True:
                self._quiet(token)
                delivery = pull(leftover)
                if delivery is None:
                    break
                received(delivery.piece)
                for call in self.after_batch:
                    call(alone)
                yield delivery.batch
            self._over(feed)
        finally:
            self._end_workers(feed)

    def _steps(self, feed: LoaderFeed, token: object) -> Iterator[Any]:
        """Batches in step with all ranks; a rank without data repeats its last one with weight 0."""
        if self._agreement is None or self._agreement.world is not step_agreement.dist.group.WORLD:
            self._agreement = Agreement(self.dataset.patience_s)
        agreed, last = self._agreement, None
        try:
            self._start(feed)
            ahead = self._look(feed, agreed)
            while True:
                self._quiet(token)
                totals = agreed.totals()
                if totals.failed:
                    raise HooksError(f"dataset {self.name!r}: another rank failed to read its data", hint="see its log")
                if totals.samples:
                    found = ahead
                    last = found.batch if found is not None else self._stand_in() if last is None else last
                    ahead = self._look(feed, agreed)
                    mine = found.piece.hi - found.piece.lo if found is not None else 0
                    self.weight, self.loss_scale = mine / totals.samples, float(mine > 0)
                    batch = last if found is None else self._hand_out(found)
                    for call in self.after_batch:
                        call(True)
                    yield batch
                elif totals.finished < agreed.world_size:
                    ahead = self._look(feed, agreed, again=True)
                else:
                    break
            self._over(feed)
        finally:
            self._end_workers(feed)

    def _look(self, feed: LoaderFeed, agreed: Agreement, *, again: bool = False) -> Delivery | None:
        """The next batch, if there is one; its size is reported to all ranks. An error is reported to them too.

        again: no rank had a batch: wait for leases that are given back, or for the end.
        """
        try:
            if again:
                self._leftover()
                feed.wait(_AGAIN_S)
            found = feed.pull(lambda: True)
        except BaseException:
            agreed.start(0, failed=True)
            agreed.totals()
            raise
        agreed.start(found.piece.hi - found.piece.lo if found is not None else 0, finished=feed.finished)
        return found

    def _stand_in(self) -> Any:
        """A batch of one readable sample, for a rank that had none yet."""
        reading: Any = self.inner.dataset
        collate: Any = cast(Any, self.inner).collate_fn
        read: Read = Read()
        for pick in stand_ins(self.dataset):
            read = collate(reading.__getitems__(pick))
            if read.good:
                return read.batch
        raise ShardsFailed(f"dataset {self.name!r}: no sample to stand in on a rank without data: {read.reason}")

    def _start(self, feed: LoaderFeed) -> None:
        """Create the inner iterator once the first lease is there, because creating it requests batches at once."""
        while not feed.borrower.ready and not feed.borrower.dry:
            feed.borrower.wait(feed.borrower.state, _AGAIN_S)
        feed.rows = iter(self.inner)

    def _end_workers(self, feed: LoaderFeed) -> None:
        """End the workers at once, not when the last traceback is dropped. Persistent ones end with `close`."""
        rows, feed.rows = feed.rows, iter(())
        if not self.inner.persistent_workers:
            shut_down(rows)

    def _hand_out(self, delivery: Delivery) -> Any:
        self.tally.received(delivery.piece)
        return delivery.batch

    def _quiet(self, token: object) -> None:
        if self._live is not token:
            raise UsageError("this iterator ended: the loader was iterated, restored or closed meanwhile")
        self.holder.refuse_forked()
        self._at_quiet_point()

    def _at_quiet_point(self) -> None:
        borrower = self._borrower
        for held, upto in self.tally.commit():
            if borrower is not None:
                borrower.committed(held, upto)
        if borrower is not None and borrower.twice is not None:
            raise borrower.twice  # raised before anything is saved
        if self.before_batch:
            for call in tuple(self.before_batch):
                call()

    def _leftover(self) -> bool:
        """No lease is left: count micro-batches without a step as done, or the epoch would wait for them forever."""
        if not self.tally.unmarked:
            return False
        if not self.tally.marks:
            raise UsageError(
                f"dataset {self.name!r}: the optimizer's steps are not reported, so nothing can be acknowledged",
                hint="elastic_loader(loader, optimizer=optimizer), or loader.mark() after each step",
            )
        log.warning(
            "dataset %r: the last %d micro-batches had no optimizer step of their own: they count as done",
            self.name, self.tally.unmarked,
        )  # fmt: skip
        self.mark()
        self.commit()
        return False

    def _over(self, feed: LoaderFeed) -> None:
        """The epoch is finished: let the DataLoader reach its end, then report what could not be read."""
        for _ in feed.rows:
            pass
        quarantined = feed.borrower.quarantined
        self._epoch, self._begun, self._live = self._epoch + 1, False, None
        self._stop_borrowing()
        if quarantined:
            tell_quarantined(self.dataset, quarantined)

    # ---- accounting -------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """The optimizer stepped: the batches received so far are in the model once the step is entirely over."""
        self.tally.mark()
        if self._live is not None:
            self._begun = True  # looking at a batch begins no epoch

    def commit(self) -> None:
        """A step boundary: what is marked is final, and is acknowledged from now on."""
        for held, upto in self.tally.commit():
            if self._borrower is not None:
                self._borrower.committed(held, upto)

    def attach(self, optimizer: Optimizer) -> None:
        """Mark at each step of `optimizer`. The optimizer does not keep the loader alive. `detach` undoes it."""
        self._marks.append(mark_on_step(optimizer, self))

    def detach(self) -> None:
        """Stop marking at optimizer steps."""
        while self._marks:
            self._marks.pop().remove()

    @property
    def step_ends(self) -> bool:
        """Always True: the loop decides how many micro-batches make a step."""
        return True

    @property
    def waited_s(self) -> float:
        """How long the loop has waited for leases in this epoch, in seconds."""
        return self._borrower.waited_s if self._borrower is not None else 0.0

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank has put into the model since the attempt began, by partition; on rank 0 also what was before.

        The union over all ranks is the content of the checkpoint. About 9 KiB for 10**9 samples and 10**4 workers.
        """
        state: dict[str, Any] = {"v": VERSION, "fingerprint": self.dataset.fingerprint, "epoch": self._epoch}
        state["own"] = {name: done.encode() for name, done in self.tally.done.items()}
        if self._holder is not None and self._holder.line.rank == 0:
            state["base"] = dict(self._holder.ledger.done)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that `state` is of this data and continue in its epoch. The master restores the finished positions.

        Raises DataMismatch; nothing is changed then.
        """
        for name, here in (("v", VERSION), ("fingerprint", self.dataset.fingerprint)):
            if state.get(name) != here:
                raise DataMismatch(
                    f"dataset {self.name!r}: the data state has {name}={state.get(name)!r}, here it is {here!r}",
                    hint="give the data, seed and shuffle of the first start, or start over",
                )
        self._leave()
        self._epoch, self._begun = int(state.get("epoch", 0)), False
        self.tally.forget()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training ended, or this epoch was left: a step boundary. Leases that are held and not done go back."""
        self._at_quiet_point()
        self._leave()

    def close(self) -> None:
        """Scale-down, or an exception: acknowledge what is committed, give everything else back, disconnect.

        Does nothing if nothing is held. Iterating again connects again.
        """
        self._leave()
        rows = vars(self.inner)["_iterator"]
        vars(self.inner)["_iterator"] = None
        shut_down(rows)
        if self._own is not None:
            if self.holder.here:
                let_go(self._own)
            self._own = self._holder = None

    def _leave(self) -> None:
        self._live = None
        self.tally.drop()
        self._stop_borrowing()

    def _stop_borrowing(self) -> None:
        if self._borrower is not None:
            self._borrower_end()
            self._borrower = None


def is_leased(loader: object) -> bool:
    """A LeasedLoader, or a DataLoader over a ShardDataset, from which one can be made."""
    return isinstance(loader, LeasedLoader) or isinstance(getattr(loader, "dataset", None), ShardDataset)


def leased_loader(loader: DataLoader[Any] | LeasedLoader, optimizer: Optimizer | None) -> LeasedLoader:
    """The result of `elastic_loader` for a loader that `is_leased`."""
    made = loader if isinstance(loader, LeasedLoader) else LeasedLoader(loader)
    if optimizer is not None:
        made.attach(optimizer)
    return made
