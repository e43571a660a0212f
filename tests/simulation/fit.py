"""What a worker trains on, and its loop: a leased dataset, or a sampler whose state is one cursor.

Stands for the leased loader, `ElasticSampler` and an adapter's loop. When a batch counts is theirs: mark at the step,
commit at the step boundary, cut there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased.applied_ranges import AppliedRanges, LeasePart
from dlrover_hooks.data.leased.lease_client import HeldLease, LeaseRequester
from dlrover_hooks.protocol import LedgerState
from tests.simulation.group import Group, Share
from tests.simulation.model import bits
from tests.simulation.threads import Lender

if TYPE_CHECKING:
    from tests.simulation.worker import Worker


class Fit:
    """One worker's data for one attempt: the ledger, its leases, what is in the model of them."""

    def __init__(self, worker: Worker, *, free: bool) -> None:
        self.worker, self.world, self.free = worker, worker.world, free
        self.tally = AppliedRanges()
        self.base: dict[str, str] = {}
        self.fence, self.rank = 0, 0
        self.lender: Lender | None = None
        self._ends: dict[str, int] = {}
        self._epoch = 0
        self._held: HeldLease | None = None
        self._next = 0

    async def open(self) -> None:
        """See `Holder.reopen`."""
        swarm, job = self.world.swarm, self.worker.job
        parts = self.world.data.partitions(self._ends)
        length = 0 if swarm.partitions else swarm.samples
        request = p.OpenLedger(
            job, self.worker.incarnation, "data", "print", parts, length, swarm.batch, swarm.shard, free=self.free
        )
        ledger: p.Ledger = await self.worker.call(request, timeout_s=600.0)
        self.fence, self.base = ledger.fence, ledger.done

    async def reopen(self, ends: dict[str, int]) -> None:
        """See `Holder.reopen`."""
        self._ends |= ends
        await self.open()

    async def finished(self, epoch: int) -> bool:
        """See `Holder.finished`."""
        ask = p.AwaitShards(self.worker.job, self.worker.incarnation, "data", self.fence, epoch, timeout_s=0.0)
        return (await self.worker.call(ask, timeout_s=600.0)).state is LedgerState.FINISHED

    def borrow(self, epoch: int) -> Lender:
        """Begin an epoch."""
        worker = self.worker
        claim = LeaseRequester(worker.job, worker.incarnation, "data", self.fence, epoch)
        self._held = None
        self.lender = Lender(self.world.loop, worker.process, worker.call, claim, self.reopen, exact=not self.free)
        return self.lender

    def pull(self) -> LeasePart | None:
        """See `LoaderFeed._cut`: the next batch of what is leased."""
        lender = self.lender
        assert lender is not None
        while not self._left(lender):
            self._held = lender.take()
            if self._held is None:
                return None
            self._next = self._held.lo
        held, lo = self._held, self._next
        assert held is not None
        hi = min(lo + self.world.swarm.batch, held.hi)
        good = self.world.data.readable(held.partition, lo, hi)
        if good < hi and self.world.data.ended(held.partition, good):
            lender.stop(held, good)
            lender.ended(held.partition, self.world.data.end(held.partition))
        elif good < hi:
            lender.stop(held, good, failed="unreadable", failed_upto=good + 1)
        self._next = good
        if good == lo:
            return self.pull()
        held.received = good
        return LeasePart(held, lo, good)

    def _left(self, lender: Lender) -> bool:
        held = self._held
        return held is not None and self._next < held.end and held.whole and not lender.lapsed(held)

    @property
    def marked(self) -> bool:
        """A step was made since the last step boundary."""
        return bool(self.tally.marks)

    def mask(self, piece: LeasePart) -> int:
        return bits(self.world.data.index(piece.held.partition), piece.lo, piece.hi)

    def commit(self) -> None:
        """A step boundary. Raises Stale if a sample is in the model that somebody else trains again."""
        for held, upto in self.tally.commit():
            if self.lender is not None:
                self.lender.committed(held, upto)
        if self.lender is not None and self.lender.twice is not None:
            raise self.lender.twice

    def state(self) -> dict[str, Any]:
        """See `LeasedLoader.state_dict`."""
        own = {name: done.encode() for name, done in self.tally.done.items()}
        return {"epoch": self._epoch, "own": own} | ({"base": dict(self.base)} if self.rank == 0 else {})

    async def close(self) -> None:
        if self.lender is not None:
            lender, self.lender = self.lender, None
            self._held = None
            await lender.end()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def train(self, group: Group, state: dict[str, Any]) -> None:
        """From `state`, what was restored of it, to the end."""
        for epoch in range(state.get("epoch", 0), self.world.swarm.epochs):
            if await self.finished(epoch):
                continue
            self._epoch = epoch
            lender = self.borrow(epoch)
            while not await self._step(group, lender):
                pass
            await self.close()

    async def _step(self, group: Group, lender: Lender) -> bool:
        """One step of all ranks; True at the end of the epoch."""
        worker = self.worker
        await worker.quiet_point()
        piece = self.pull()
        if piece is None:
            lender.surface()
        batch = self.mask(piece) if piece is not None else 0
        if piece is not None:
            await worker.compute()
        finished = lender.state is LedgerState.FINISHED and not lender.ready and piece is None
        total = await worker.reduce(group, Share(worker.model, batch, finished))
        if total.batches:
            if piece is not None:
                self.tally.received(piece)
            self.tally.mark()
            worker.stepped(total)
        elif total.finished:
            await worker.quiet_point()
            return True
        elif not lender.ready:
            await lender.wait_for(1.0)
        return False


class Sampled:
    """See `Fit`: the data state is the same on all ranks, so that any of them can go on with it. No master is asked."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.cursor, self.rank = worker, 0, 0
        self._drawn = 0
        self._size = worker.world.data.size

    async def open(self) -> None:
        """There is no ledger."""

    async def close(self) -> None:
        """Nothing is held."""

    @property
    def marked(self) -> bool:
        """A step was made since the last step boundary."""
        return self._drawn > 0

    def commit(self) -> None:
        """A step boundary: what was drawn is in the model."""
        self.cursor += self._drawn
        self._drawn = 0

    def state(self) -> dict[str, Any]:
        """See `ElasticSampler.state_dict`."""
        return {"cursor": self.cursor}

    async def train(self, group: Group, state: dict[str, Any]) -> None:
        """From `state`, what was restored of it, to the end: each rank takes the next batch of each step."""
        worker, chair = self.worker, self.worker.chair
        self.cursor = state.get("cursor", 0)
        worker.world.promises.sampled(worker.model, self.cursor)
        batch = worker.world.swarm.batch
        while True:
            await worker.quiet_point()
            if self.cursor >= self._size:
                return
            ends = [min(self._size, self.cursor + rank * batch) for rank in (chair.rank, chair.rank + 1)]
            await worker.compute()
            total = await worker.reduce(group, Share(worker.model, bits(0, *ends)))
            self._drawn = min(self._size - self.cursor, chair.world_size * batch)
            worker.stepped(total)
