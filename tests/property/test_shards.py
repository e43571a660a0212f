"""Leased shards: no position lost, none twice in the model that survives."""

from __future__ import annotations

import msgspec
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, precondition, rule

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.protocol.ranges import Ranges
from tests.e2e.job_script import attach, join
from tests.property.shard_world import DATA, JOB, ShardWorld

LENGTH, EPOCHS = 30, 2
UNREADABLE = 7


class Image(msgspec.Struct, frozen=True):
    """A checkpoint: how often the model saw each position, and each rank's part of the cut."""

    generation: p.Generation
    seen: tuple[int, ...]
    parts: tuple[str, ...]


class Mine(msgspec.Struct):
    """A lease in a worker: `at` is trained, `told` is acknowledged."""

    lease: p.Lease
    at: int
    failed: bool = False


class Worker(msgspec.Struct):
    name: str
    fence: int
    held: dict[int, Mine] = {}
    own: Ranges = msgspec.field(default_factory=Ranges)


class Synchronous(ShardWorld):
    """Members of a round: they train, acknowledge late, die, and all go back to a checkpoint at another world size."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[Worker] = []
        self.zombies: list[Worker] = []
        self.images: list[Image] = []
        self.seen = [0] * (LENGTH * EPOCHS)
        self.base = Ranges()
        self.step = 0
        self.broken = True
        self.told_bad: set[int] = set()
        self.dead: set[str] = set()

    @initialize(world=st.integers(1, 3), batch=st.integers(1, 3), shard=st.sampled_from([0, 5, 8]))
    def first(self, world: int, batch: int, shard: int) -> None:
        self.batch, self.shard = batch, shard
        self.start(world, 0, 0)

    # ---- attempts ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.broken or bool(self.images))
    @rule(world=st.integers(1, 4), lost_images=st.integers(0, 2), kept=st.integers(0, 2))
    def start(self, world: int, lost_images: int, kept: int) -> None:
        """Some processes go on, the others are new; the newest images may be gone. The master says what is loaded."""
        self.zombies = (self.zombies + self.workers)[-4:]
        names = [worker.name for worker in self.workers if worker.name not in self.dead][:kept]
        names = [*names, *(self.named("w") for _ in range(world))][:world]
        agent, seats = "agent", tuple(p.Seat(name, index) for index, name in enumerate(names))
        self.send(join(agent, seats=seats, low=1, high=world))
        formed = self.state.jobs[JOB].rounds.round
        assert formed is not None
        seats = tuple(sorted(seats, key=lambda seat: formed.members[seat.incarnation].rank))
        del self.images[max(0, len(self.images) - lost_images) :]
        stored = tuple(p.Manifest(JOB, image.generation, len(image.parts), (), 0.0) for image in self.images)
        for seat in seats:
            self.send(attach(seat.incarnation, agent, save_to="/tree", stored=stored))
        while (plan := self.plan(seats[0].incarnation)).phase is p.Phase.RESTORING:
            self.load(plan, seats)
        self.begin(plan, seats)

    def plan(self, name: str) -> p.Plan:
        job = self.state.jobs[JOB]
        assert job.rounds.round is not None
        del name
        return p.Plan(job.plan.number, job.rounds.number, job.rounds.round.phase, job.attempt, restore=job.plan.restore)

    def load(self, plan: p.Plan, seats: tuple[p.Seat, ...]) -> None:
        """Every rank sends the parts of the old ranks that are its own modulo the world."""
        assert plan.restore is not None
        image = next(image for image in self.images if image.generation == plan.restore.generation)
        for rank, seat in enumerate(seats):
            parts = [Ranges.decode(part) for part in image.parts[rank :: len(seats)]]
            mine = Ranges.of(pair for part in parts for pair in part)
            ok = mine.size == sum(part.size for part in parts)
            self.send(p.Loaded(JOB, seat.incarnation, plan.round, ok, cuts={DATA: {"": mine.encode()}} if ok else {}))
            if self.plan(seat.incarnation).round != plan.round:
                assert max(image.seen) > 1, "a good checkpoint was given up"
                return

    def begin(self, plan: p.Plan, seats: tuple[p.Seat, ...]) -> None:
        image = None
        if plan.restore is not None:
            image = next(image for image in self.images if image.generation == plan.restore.generation)
        self.seen = list(image.seen) if image else [0] * (LENGTH * EPOCHS)
        self.base = Ranges.of((at, at + 1) for at, count in enumerate(self.seen) if count)
        assert max(self.seen) <= 1, "a model that saw a sample twice lives on"
        self.workers = []
        for rank, seat in enumerate(seats):
            reply = self.send(self.opening(seat.incarnation))
            assert isinstance(reply, p.Ledger)
            assert reply.fence == plan.attempt
            if rank == 0:
                assert Ranges.decode(reply.done.get("", "")) == self.base
            self.workers.append(Worker(seat.incarnation, reply.fence))
        self.broken = False

    def opening(self, name: str) -> p.OpenLedger:
        whole = (p.Partition(end=LENGTH * EPOCHS),)
        return p.OpenLedger(JOB, name, DATA, "f", whole, LENGTH, self.batch, self.shard)

    # ---- work --------------------------------------------------------------------------------------------------------

    def call(self, worker: Worker, *, count: int = 0, epoch: int = 0, acks: tuple[p.Ack, ...] = ()) -> p.Leases | None:
        """None: the master refused, so this worker's process ends and with it the round."""
        try:
            reply = self.send(p.TakeLeases(JOB, worker.name, DATA, worker.fence, count, epoch, acks, rate=0.05))
        except Stale:
            self.broken = True
            return None
        assert isinstance(reply, p.Leases)
        for lease in reply.leases:
            assert lease.hi - lease.lo > 0
            assert epoch * LENGTH <= lease.lo < lease.hi <= (epoch + 1) * LENGTH
            worker.held[lease.id] = Mine(lease, lease.lo)
        return reply

    @precondition(lambda self: not self.broken)
    @rule(
        who=st.integers(0, 3),
        count=st.integers(0, 3),
        epoch=st.integers(0, EPOCHS - 1),
        steps=st.integers(0, 12),
        tell=st.sampled_from(["all", "all", "late", "back", "twice"]),
    )
    def work(self, who: int, count: int, epoch: int, steps: int, tell: str) -> None:
        """One worker takes, trains some and says so, late or again; it does not know what ran out meanwhile."""
        worker = self.workers[who % len(self.workers)]
        if self.call(worker, count=count, epoch=epoch) is None:
            return
        self.train(worker, steps)
        if tell != "late" and not self.broken:
            self.acknowledge(worker, back=tell == "back", times=1 + (tell == "twice"))

    def train(self, worker: Worker, count: int) -> None:
        for mine in worker.held.values():
            while mine.at < mine.lease.hi and count and not mine.failed:
                mine.failed = mine.at == UNREADABLE
                if mine.at in worker.own:  # it ran out, and came back to the same worker
                    self.broken = True
                    return
                if not mine.failed:
                    self.seen[mine.at] += 1
                    worker.own.add(mine.at, mine.at + 1)
                    mine.at, count = mine.at + 1, count - 1

    def acknowledge(self, worker: Worker, *, back: bool = False, times: int = 1) -> None:
        held = list(worker.held.items())
        acks = tuple(p.Ack(number, mine.at, "unreadable" if mine.failed else "", back=back) for number, mine in held)
        if self.call(worker, acks=acks) is None:
            return
        for _ in range(times - 1):
            assert self.call(worker, acks=acks) is not None, "the same again was refused"
        for number, mine in held:
            if back or mine.failed or mine.at == mine.lease.hi:
                del worker.held[number]
        older = tuple(p.Ack(number, mine.lease.lo) for number, mine in worker.held.items())
        self.call(worker, acks=older)

    @precondition(lambda self: not self.broken)
    @rule()
    def save(self) -> None:
        """Every rank's own part, as of one step; rank 0's holds what was restored too."""
        self.step += 1
        parts = [worker.own.copy() for worker in self.workers]
        parts[0].update(self.base)
        generation = p.Generation(self.state.jobs[JOB].attempt, self.step, "run0")
        self.images.append(Image(generation, tuple(self.seen), tuple(part.encode() for part in parts)))

    # ---- trouble -----------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Leases run out."""
        self.tick(seconds)

    @rule()
    def kill_the_master(self) -> None:
        self.restart()

    @precondition(lambda self: not self.broken)
    @rule(who=st.integers(0, 3))
    def kill(self, who: int) -> None:
        name = self.workers[who % len(self.workers)].name
        self.send(Lost(JOB, name))
        self.dead.add(name)
        self.broken = True

    @precondition(lambda self: not self.broken and len(self.workers) > 1)
    @rule()
    def oversleep(self) -> None:
        """A step takes so long that the leases run out: others train on them too, and both are in a checkpoint."""
        slow, quick = self.workers[:2]
        if self.call(slow, count=1) is None:
            return
        self.train(slow, 3)
        self.tick(700.0)
        if self.call(quick, count=2) is not None:
            self.train(quick, 30)
        if not self.broken:
            self.acknowledge(quick)
            self.save()

    @precondition(lambda self: bool(self.zombies))
    @rule(who=st.integers(0, 3), as_member=st.booleans())
    def zombie(self, who: int, as_member: bool) -> None:
        """A worker that slept through a restore is refused, whatever it says, and any that uses its fence, too."""
        worker = self.zombies[who % len(self.zombies)]
        acks = tuple(p.Ack(number, mine.lease.hi) for number, mine in worker.held.items())
        name = self.workers[0].name if as_member else worker.name
        before = job_registry.encode(self.state)
        for event in (
            p.TakeLeases(JOB, name, DATA, worker.fence, 1),
            p.TakeLeases(JOB, name, DATA, worker.fence, 0, 0, acks),
        ):
            try:
                self.send(event)
            except Stale:
                continue
            raise AssertionError("a zombie was heard")
        assert job_registry.encode(self.state) == before

    @precondition(lambda self: not self.broken and len(self.workers) > 1)
    @rule(who=st.integers(0, 3))
    def thief(self, who: int) -> None:
        """A worker that acknowledges another's lease, or one that nobody has, is refused."""
        worker, other = self.workers[who % len(self.workers)], self.workers[(who + 1) % len(self.workers)]
        for lease in (*(mine.lease for mine in other.held.values()), p.Lease(10**6, "", 0, LENGTH, 1.0)):
            acks = (p.Ack(lease.id, lease.hi),)
            try:
                self.send(p.TakeLeases(JOB, worker.name, DATA, worker.fence, 0, 0, acks))
            except Stale:
                continue
            raise AssertionError("the wrong worker was heard")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Whatever came before: go on from the newest image to the end, and count."""
        if not hasattr(self, "batch"):
            return
        self.start(2, 0, 0)
        for epoch in range(EPOCHS):
            assert any(self.finish(epoch) for _ in range(200)), f"epoch {epoch} never ends"
        for at, count in enumerate(self.seen):
            assert count == (0 if at in self.told_bad else 1), f"position {at} was trained on {count} times"
        assert self.told_bad <= {UNREADABLE}
        assert self.state.jobs[JOB].ledgers.named[DATA].leases == {}

    def finish(self, epoch: int) -> bool:
        for worker in self.workers:
            reply = self.call(worker, count=2, epoch=epoch)
            assert reply is not None
            if reply.state is p.LedgerState.FINISHED:
                self.told_bad |= {at for one in reply.quarantined for at in range(one.lo, one.hi)}
                return True
            self.train(worker, 1000)
            self.acknowledge(worker)
        return False


TestSynchronous = Synchronous.TestCase
TestSynchronous.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
