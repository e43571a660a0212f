"""One training process: attach, load what the master picked, train step by step with the others, save, leave.

Stands for `Session`, which holds tensors. What it says to the master, and in which order, is the session's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.save.schedule import save_due
from dlrover_hooks.data.session_datasets import united
from dlrover_hooks.errors import CheckpointError, HooksError, MasterAway, Stale
from tests.simulation.client import Client
from tests.simulation.fit import Fit, Sampled
from tests.simulation.group import Aborted, Group, Share, Total
from tests.simulation.loop import Process
from tests.simulation.memory import Engine, Image
from tests.simulation.model import Model
from tests.simulation.parting import Parting
from tests.simulation.survivor import Chair, Gone, Survivor
from tests.simulation.swarm import Level, Recovery
from tests.simulation.threads import Bell, Post

if TYPE_CHECKING:
    from tests.simulation.world import World

FORM_S = 900.0
FINISH_S = 600.0


class Worker:
    """One process. `ended` is set to its exit code, unless its machine crashes. `newcomer`: it asks for its seat."""

    def __init__(self, world: World, node: str, job: str, chair: Chair, *, launcher: str = "") -> None:
        self.world, self.node, self.job, self.chair = world, node, job, chair
        self.incarnation, self.model = chair.incarnation, Model()
        self.newcomer = chair.round == 0
        self.process = Process(f"{node}.{chair.incarnation}", world.loop, rate=world.rate())
        self.client = Client(world.network, self.process, node, self.incarnation, 60.0)
        self.call = self.client.call
        self.exit_code: int | None = None
        self.engine = Engine(world, node, chair.local_rank, lambda notice: self._noticed(notice))
        self.post: Post | None = None
        self.group: Group | None = None
        self.fit: Fit | Sampled
        self.notices: int = 0
        """The newest round that is known to be broken."""
        self.heard = Bell(world.loop, self.process)
        """Rung when one is."""
        self.waiting = 0
        """So many newcomers wait."""
        self.told_to_fail = False
        self.parting: Parting | None = None
        """None: training has not begun once, and SIGTERM is the end."""
        self.round = 0
        self.waits_for_chair: asyncio.Future[None] | None = None
        self.next_chair = chair
        self.survives = False
        """It speaks for itself, and has lived through a round."""
        self.survivor = Survivor(self, launcher) if world.swarm.recovery is Recovery.WORKER else None
        self.restored: dict[str, Any] = {}
        """The data state that was restored."""
        self.begun_at = self.longest = 0
        """The step that the attempt began at, and the longest interval between saves that it heard of."""
        self._training = self.early = False
        """`early`: its script has ended with 0 in training."""
        self.process.ends.append(self._died)

    def start(self) -> None:
        self.process.spawn(self._live())

    @property
    def waits(self) -> bool:
        """It has no seat, and lives."""
        return self.waits_for_chair is not None and not self.waits_for_chair.done()

    def seat(self, chair: Chair) -> None:
        """Its agent has another seat for it."""
        self.next_chair = chair
        if self.waits_for_chair is not None and not self.waits_for_chair.done():
            self.waits_for_chair.set_result(None)

    async def sigterm(self) -> None:
        """Somebody wants it to go."""
        if self.parting is None:
            return self.exit(143)
        self.parting.flag("SIGTERM")
        if self.post is not None:
            self.post.wake()

    def _noticed(self, notice: Any) -> None:
        if self.post is not None:
            self.post.notice(notice)

    def _died(self) -> None:
        if self.group is not None:
            silent = self.node in self.world.network.gone
            self.group.left(self.chair.rank, silent=silent, done=self.exit_code == 0)
        if self.exit_code is None:
            self.exit_code = -9
        self.world.exited(self)

    @property
    def trains(self) -> bool:
        """It has a seat in a round, and is not done."""
        return self._training

    def exit(self, code: int) -> None:
        """Its process ends."""
        self.exit_code = code
        self.process.kill()

    # ---- a life ------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._begin()
            while True:
                try:
                    await self._attempt()
                    return self.exit(0)
                except (Aborted, HooksError) as error:
                    await self._next_round(error)
        except Gone as gone:
            self.exit(gone.args[0])
        except Aborted:
            self.world.tell(self.process.name, "its collective failed")
            await self._farewell()
            self.exit(1)
        except HooksError as error:
            self.world.tell(self.process.name, f"ends with {type(error).__name__}: {error.message[:120]}")
            self.exit(p.AGAIN if isinstance(error, Stale) else 1)
        except Exception as error:
            self.world.promises.bug(error)

    async def _begin(self) -> None:
        """Import, and take a seat if the agent has given none."""
        if self.newcomer:
            assert self.survivor is not None
            await self.process.sleep(self.world.dice.uniform(0.5, 8.0))
            await self.survivor.take_seat()
        await self.process.sleep(self.world.dice.uniform(0.01, 2.0))
        self.client.watch(self.job, self._notice, lambda error: None)

    async def _farewell(self) -> None:
        """Half of all scripts that fail say so."""
        if self.world.dice.random() < 0.5:
            try:
                await self.call(p.Leave(self.job, self.incarnation, p.Departure.FAILED), timeout_s=5.0)
            except HooksError:
                return

    async def _next_round(self, error: Aborted | HooksError) -> None:
        """The round may be over for this process, which stays; `error` is raised again if it is not to."""
        if self.survivor is not None:
            await self.survivor.regroup(error)
        elif self.world.swarm.recovery is Recovery.AGENT and isinstance(error, Aborted):
            await self._next_chair()
        else:
            raise error

    async def _next_chair(self) -> None:
        """Its agent asks for a seat for it."""
        if self.group is not None:
            self.group.left(self.chair.rank, silent=False)
        await self.fit.close()
        self.waits_for_chair = self.world.loop.create_future()
        self.world.exited(self)
        await self.waits_for_chair
        self.chair, self.waits_for_chair = self.next_chair, None
        if self.post is not None:
            self.post.end()

    def _notice(self, notice: p.Notice) -> None:
        self.waiting = notice.waiting
        if notice.parting and self.post is not None:
            self.post.beat_now()
        if notice.broken:
            self.notices = max(self.notices, notice.round)
            self.heard.put(None)
            if self.group is not None and self.round and notice.round >= self.round:
                self.group.cut(self.chair.rank)

    async def _attempt(self) -> None:
        chair, swarm = self.chair, self.world.swarm
        self.round, self.fit = chair.round, Fit(self, free=False) if swarm.leased else Sampled(self)
        self.model, self.restored, self.saved_at = Model(), {}, -1
        attached = await self.call(self._attach(), timeout_s=60.0)
        if attached.rank != chair.rank or attached.world_size != chair.world_size:
            self.world.promises.check(False, f"{self.incarnation} was told two ranks")
        seat = self.job, (self.incarnation, chair.rank, chair.world_size)
        post = self.post = Post(self.world.loop, self.process, self.call, seat, self.engine, swarm.beat_s)
        self.parting = post.preemption = Parting(self, self.parting)
        if self.survives:  # the master has heard its heartbeats, and goes on to expect them
            post.begin(p.Cadence())
        plan = await self._plan()
        self.round = plan.round
        group = self._enter(plan)
        if not self.survives:
            post.begin(plan.cadence)
        post.cadence = plan.cadence
        self.parting.begin(self.model.step)
        self.begun_at, self.longest = self.model.step, 0
        self.fit.rank = chair.rank
        await self.fit.open()
        base = self.fit.base if chair.rank == 0 and isinstance(self.fit, Fit) else None
        self.world.promises.begun(self.job, plan, self.model, base)
        self.world.durability.begun(self)
        self._training = True
        try:
            await self.fit.train(group, self.restored)
        finally:
            self._training = False
        await self._finish()

    def _enter(self, plan: p.Plan) -> Group:
        """The process group of the round. Raises Aborted if it is broken already."""
        chair, engine = self.chair, self.engine
        group = self.group = self.world.group(f"{chair.prefix} {plan.round} {plan.attempt}")
        group.enter(chair.rank, chair.world_size, self.process, self.incarnation)
        if self.notices >= plan.round:
            raise Aborted
        engine.run, engine.attempt = plan.run, plan.attempt
        engine.rank, engine.world_size = chair.rank, chair.world_size
        if engine.keeper is not None:
            engine.keeper.take_seat(chair.local_rank)
        return group

    def _attach(self) -> p.Attach:
        swarm, keeper, local = self.world.swarm, self.engine.keeper, self.chair.local_rank
        alone = self.survives or swarm.level is Level.SHRINK  # that of local rank 0 may be gone
        speaks = keeper if local == 0 or alone else None
        attach = p.Attach(
            self.job,
            self.incarnation,
            self.node,
            1,
            save_to=swarm.save_to and swarm.save_to + self.job,
            save_every=swarm.save_every,
            persist_every=swarm.persist_every,
            held=speaks.held() if speaks is not None else (),
            stored=self.world.stored() if self.chair.rank == 0 else (),
            keeper=p.KeeperAddress(self.node, "127.0.0.1", 1) if speaks is not None and swarm.replicas else None,
            secret=p.Secret("key"),
            recovers=self.survivor is not None,
        )
        self.world.promises.offered(attach)
        return attach

    async def _plan(self) -> p.Plan:
        plan, deadline = p.Plan(number=0), self.process.clock() + FORM_S
        while plan.phase is not p.Phase.TRAINING:
            ask = p.AwaitPlan(self.job, self.incarnation, after=plan.number or 0, timeout_s=20.0)
            answer: p.Plan = await self.call(ask, timeout_s=60.0)
            if self.process.clock() > deadline:
                raise MasterAway("waited too long for all workers")
            if answer.number is None:
                continue
            plan = answer
            if plan.phase is p.Phase.BROKEN:
                raise Aborted
            if plan.replication is not None and self.engine.keeper is not None:
                self.engine.keeper.to = plan.replication.to
            if plan.phase is p.Phase.RESTORING and plan.restore is not None:
                await self._load(plan, plan.restore)
        if plan.restore is None:
            self.model, self.restored = Model(), {}
        return plan

    async def _load(self, plan: p.Plan, choice: p.Restore) -> None:
        """See `Session._load`."""
        await self.process.sleep(self.world.dice.uniform(0.01, 1.0))
        ok, reason, cuts = True, "", {}
        try:
            first, *parts = await self.engine.load(choice, self.chair.rank, self.chair.world_size, self._locate)
            if self.world.swarm.leased:
                cuts = united({"data": image.leases} for image in parts)
            self._restored(plan, first)
        except CheckpointError as error:
            ok, reason = False, error.message
            self.world.tell(self.process.name, f"cannot load {choice.generation}: {error.message}")
        try:
            await self.call(p.Loaded(self.job, self.incarnation, plan.round, ok, reason, cuts), timeout_s=60.0)
        except Stale:
            return

    def _restored(self, plan: p.Plan, image: Image) -> None:
        self.model, self.restored = image.model, image.leases
        assert plan.restore is not None
        self.world.promises.loaded(plan.restore, image)
        if plan.restore.source is not p.Source.STORAGE:
            self.engine.restored(plan.restore.generation)

    async def _locate(self, generation: p.Generation, rank: int) -> p.Located:
        return await self.call(p.Locate(self.job, self.incarnation, generation, rank))

    # ---- what the loop asks of it -----------------------------------------------------------------------------------

    async def compute(self) -> None:
        """Forward and backward."""
        await self.process.sleep(self.world.swarm.step_s * self.world.dice.uniform(0.8, 1.2))

    async def reduce(self, group: Group, share: Share) -> Total:
        """The step's collective. Raises Aborted."""
        return await group.reduce(self.chair.rank, self.chair.world_size, share)

    def stepped(self, total: Total) -> None:
        """The optimizer has stepped."""
        self.model = self.model.stepped(total.batches, total.again)
        assert self.post is not None
        self.post.step, self.post.step_s = self.model.step, self.world.swarm.step_s

    async def quiet_point(self) -> None:
        """All that belongs to a step is done: obey, save if it is due. Raises Aborted where newcomers wait."""
        post = self.post
        assert post is not None
        self._obey()
        if isinstance(post.error, Stale):
            raise post.error
        post.error = None
        stepped = self.fit.marked and self.saved_at != self.model.step
        self.fit.commit()
        assert self.parting is not None
        saved = await self.parting.quiet_point()
        if stepped and not saved and save_due(post.cadence, self.model.step):
            await self.save()
        if stepped:
            self._check_cadence(post.cadence)
            self.world.durability.stepped(self)
        if stepped and self.survivor is not None:
            self.survivor.quiet_point()

    saved_at = -1

    def _check_cadence(self, cadence: p.Cadence) -> None:
        """Saves are as far apart as the master says; before it knows, as long as the attempt has trained for.

        Whatever step the attempt has begun at.
        """
        self.longest = max(self.longest, cadence.every)
        done, waited = self.model.step - self.begun_at, self.model.step - max(self.saved_at, self.begun_at)
        late = f"{self.incarnation} began at step {self.begun_at} and has not saved since {waited} steps"
        self.world.promises.check(waited <= self.longest + done // 2, late)

    async def save(self, *, last: bool = False, durable: bool = False) -> bool:
        """See `Session.cut`, `HastySave.make` and `LastSave.make`."""
        self.saved_at = self.model.step
        assert self.post is not None
        generation = p.Generation(self.engine.attempt, self.model.step, self.engine.run)
        world_size = self.chair.world_size
        ok = await self.engine.save(self.process, self.model, self.fit.state(), world_size, last=last)
        if ok:
            self.post.saved(generation, 0.01, durable=durable)
        elif not last:
            self.post.skipped(generation)
        return ok

    def _obey(self) -> None:
        if self.told_to_fail:
            self.world.tell(self.process.name, "ends with an exception in the script")
            raise Gone(1)

    async def _finish(self) -> None:
        """See `LastSave`: the last generation becomes durable, or patience ends."""
        if self.world.swarm.save_to is not None:
            await self._last_save()
        assert self.post is not None
        self.post.end()
        self.world.promises.trained(self.job, self.model)
        try:
            leave = p.Leave(self.job, self.incarnation, p.Departure.DONE, self.model.step)
            await self.call(leave, timeout_s=5.0)
        except HooksError:
            self.world.promises.silent = True
            self.world.tell(self.process.name, "left without a reply of the master")

    async def _last_save(self) -> None:
        post, engine = self.post, self.engine
        assert post is not None
        generation = p.Generation(engine.attempt, self.model.step, engine.run)
        deadline = self.process.clock() + FINISH_S
        saved = False
        while self.process.clock() < deadline:
            self._obey()
            if self.notices >= self.round and self.world.swarm.recovery is not Recovery.RESTART:
                raise Aborted
            if post.generations.retry(generation):
                saved = False
            if generation in post.broken:
                return
            saved = saved or await self.save(last=True, durable=True)
            if isinstance(post.error, Stale):
                raise post.error
            view: p.JobView = await self.call(p.ShowJob(self.job), timeout_s=60.0)
            if view.newest_committed is not None and view.newest_committed >= generation:
                return
            await self.process.sleep(2.0)
