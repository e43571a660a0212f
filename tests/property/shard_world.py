"""A leased dataset as hypothesis sees it: the books against a plain set of positions."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterError
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.effects import Effect
from dlrover_hooks.master.core.events import Tick
from dlrover_hooks.master.core.leased_data.ledger import DatasetLedger

JOB, DATA = "job", "data"


class ShardWorld(RuleBasedStateMachine):
    """One job with one ledger. A refused event leaves every byte as it was; so does a new life of the master."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.now, self.lives = job_registry.Master(), 1000.0, 0
        self.effects: list[Effect] = []

    def send(self, event: p.Message) -> p.Message:
        """Raises what the core raises, after a look that nothing was changed."""
        before = job_registry.encode(self.state)
        try:
            outcome = job_registry.apply(self.state, event, self.now)
        except MasterError:
            assert job_registry.encode(self.state) == before, f"a refused {type(event).__name__} changed the state"
            raise
        self.effects += outcome.effects
        return outcome.reply

    @property
    def ledger(self) -> DatasetLedger | None:
        job = self.state.jobs.get(JOB)
        return job.ledgers.named.get(DATA) if job else None

    def named(self, kind: str) -> str:
        """A new incarnation."""
        self.lives += 1
        return f"{kind}{self.lives}"

    def tick(self, seconds: float) -> None:
        self.now += seconds
        if JOB in self.state.jobs:
            self.send(Tick(JOB))

    def restart(self) -> None:
        """kill -9 of the master, and the next life."""
        data = job_registry.encode(self.state)
        self.state = job_registry.decode(data)
        assert job_registry.encode(self.state) == data

    @invariant()
    def the_books_are_a_partition(self) -> None:
        """Done, doing, todo and quarantined: each position in exactly one of them."""
        ledger = self.ledger
        if ledger is None:
            return
        for name, books in ledger.books.items():
            end = books.next if books.end is None else books.end
            doing = [(lent.at, lent.hi) for lent in ledger.leases.values() if lent.partition == name]
            back = [(piece.lo, piece.hi) for piece in books.returned]
            bad = [(piece.lo, piece.hi) for piece in books.bad]
            todo = [(books.next, end)]
            places = [at for lo, hi in (*books.done, *doing, *back, *bad, *todo) for at in range(lo, hi)]
            assert sorted(places) == list(range(books.begin, end))
            assert books.returned_size == sum(hi - lo for lo, hi in back)
            assert back == sorted(back)
            assert bad == sorted(bad)
            assert name in ledger.open or not (back or todo[0][0] < todo[0][1] or books.end is None)

    @invariant()
    def leases_belong_to_holders(self) -> None:
        """Both sides of the books agree, and every lease is looked at in time."""
        ledger = self.ledger
        if ledger is None:
            return
        held = {number: name for name, holder in ledger.holders.items() for number in holder.leases}
        assert held == {number: lent.holder for number, lent in ledger.leases.items()}
        assert sum(ledger.doing.values()) == len(ledger.leases)
        for lent in ledger.leases.values():
            assert ledger.holders[lent.holder].queued <= lent.until
            assert (ledger.holders[lent.holder].queued, lent.holder) in ledger.heap
        if ledger.leases:
            assert self.state.jobs[JOB].alarm <= max(ledger.heap[0][0], self.state.jobs[JOB].ledgers.expired_at + 1.0)
