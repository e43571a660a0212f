"""A node's agent. Stands for the launcher on several nodes, as it is where its workers do not speak for themselves.

A worker that dies is told of, all local workers end (or the survivors stay), and the node joins again. A new agent ends
what the one before has left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, HooksError, JournalFailed, MasterAway
from dlrover_hooks.launcher.failures.round_diagnosis import all_ended
from tests.simulation.client import Client
from tests.simulation.loop import Process
from tests.simulation.survivor import Chair
from tests.simulation.swarm import Level, Recovery
from tests.simulation.threads import Bell
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.node import Node
    from tests.simulation.world import World

_FORM_S = 60.0


class Agent:
    """One life of a node's launcher."""

    def __init__(self, world: World, node: Node) -> None:
        self.world, self.node = world, node
        self.job = world.job
        self.incarnation = world.named("agent")
        self.process = Process(f"{node.name}.{self.incarnation}", world.loop, rate=world.rate())
        self.client = Client(world.network, self.process, node.name, self.incarnation, 60.0)
        self.bell = Bell(world.loop, self.process)
        self.local_ranks = list(range(world.swarm.workers))
        self._round, self._broken, self._finished = 0, 0, False
        self._first = True
        self._unheard: list[p.Exited] = []
        self._early: set[str] = set()
        """Workers that ended with 0 in training, which the master is told of."""

    def start(self) -> None:
        for worker in list(self.node.workers):  # their launcher's end ended them, too
            worker.process.kill()
        self.node.workers = []
        self.process.spawn(self._live())

    async def _live(self) -> None:
        try:
            while not self._finished and not await self._round_of():
                pass
            for worker in list(self.node.workers):
                worker.process.kill()
            self.world.done(self.node)
            self.process.kill()
        except Exception as error:
            self.world.promises.bug(error)

    async def _round_of(self) -> bool:
        """Join, run the workers until something happens, tell of it. True: the job is over."""
        try:
            joined = await self._join()
            if joined.finished:
                return True
            seated = await self._seated()
        except (HooksError, asyncio.TimeoutError) as error:
            self._refused(error)
            later_s = 15.0 if isinstance(error, BadRequest) else 1.0  # there is no room for it
            await self.process.sleep(self.world.dice.uniform(0.1, later_s))
            return False
        if seated is None:
            return self._finished
        self._fill(seated)
        await self._until_over()
        if self._finished and all(worker.exit_code == 0 for worker in self.node.workers):
            return True
        await self._report()
        return False

    async def _until_over(self) -> None:
        """Until this node has to join again."""
        while not self._over():
            await self._rung(30.0)

    async def _rung(self, seconds: float) -> None:
        await self._tell_early()
        await self._tell_again()
        await self.bell.wait(min(seconds, 1.0) if self._unheard else seconds)
        if self.bell._items:
            self.bell.pop()

    def _refused(self, error: BaseException) -> None:
        """The seats that it asked for are not to be had: the worker of each must be a new process."""
        self.world.tell(self.process.name, f"joins again: {type(error).__name__} {str(error)[:90]}")
        if not isinstance(error, MasterAway):
            self._end_workers()

    # ---- a round -----------------------------------------------------------------------------------------------------

    async def _join(self) -> p.Joined:
        swarm, alive = self.world.swarm, {worker.chair.local_rank: worker for worker in self.node.workers}
        self.seats = tuple(
            p.Seat(alive[local].incarnation if local in alive else self.world.named("w"), local)
            for local in self.local_ranks
        )
        low, high = swarm.bounds
        await self.client.call(p.ListJobs(), timeout_s=_FORM_S)
        join = p.Join(
            job=self.job,
            incarnation=self.incarnation,
            node=self.node.name,
            seats=self.seats,
            host=self.node.name,
            port=29500,
            min_workers=low,
            max_workers=high,
            proposed_run=f"run of {self.incarnation}",
            last_call_s=swarm.last_call_s,
            sole=True,
            shrinks=swarm.level is Level.SHRINK,
        )
        joined: p.Joined = await self.client.call(join, timeout_s=_FORM_S)
        if self._first and not joined.finished:
            self._first = False
            self._watch()
        return joined

    def _watch(self) -> None:
        self.client.watch(self.job, self._notice, self._outdated)

    def _notice(self, notice: p.Notice) -> None:
        self._finished = self._finished or notice.finished
        if notice.broken:
            self._broken = max(self._broken, notice.round)
        self.bell.put("notice")

    def _outdated(self, error: HooksError) -> None:
        self._first = True
        self._broken = max(self._broken, self._round)
        self.bell.put("outdated")

    async def _seated(self) -> p.Seated | None:
        """The seats, None if the job ended meanwhile. Raises Stale if this agent is not waited for any more."""
        deadline = self.process.clock() + _FORM_S
        while not self._finished and self.process.clock() < deadline:
            ask = p.AwaitRound(self.job, self.incarnation, after=self._round, timeout_s=5.0)
            seated: p.Seated = await self.client.call(ask, timeout_s=_FORM_S)
            if seated.round is not None:
                self._round = seated.round
                return seated
        return None

    def _fill(self, seated: p.Seated) -> None:
        """Start the workers; survivors get their new seats."""
        alive = {worker.incarnation: worker for worker in self.node.workers}
        for seat, rank in zip(self.seats, seated.ranks, strict=True):
            chair = Chair(seat.incarnation, seat.local_rank, rank, seated.world_size, seated.store_prefix, self._round)
            worker = alive.get(seat.incarnation)
            if worker is not None:
                worker.seat(chair)
            else:
                self._start(chair)

    def _start(self, chair: Chair) -> None:
        worker = Worker(self.world, self.node.name, self.job, chair, launcher=self.incarnation)
        self.node.workers.append(worker)
        worker.start()

    def _over(self) -> bool:
        """Something has to be done about this round. Though all workers here are done, others may need theirs again."""
        workers = self.node.workers
        ended = [worker for worker in workers if worker.exit_code is not None]
        if self._finished or any(worker.exit_code for worker in ended):
            return True
        return self._broken >= self._round or any(worker.waits for worker in workers)

    async def _report(self) -> None:
        """Tell whose process ended. Survivors stay or end; those that stay have to notice that the round broke."""
        for worker in self.node.workers:
            if worker.exit_code:
                await self._tell(worker)
        if self.world.swarm.recovery is not Recovery.AGENT:
            return self._end_workers()
        deadline = self.process.clock() + 20.0
        while self._undecided() and self.process.clock() < deadline:
            await self._rung(0.5)
        for worker in self._undecided():
            worker.process.kill()
        self.node.workers = [worker for worker in self.node.workers if worker.exit_code is None]

    async def _tell(self, worker: Worker) -> None:
        """Its process ended."""
        code = worker.exit_code or 0
        exited = p.Exited(self.job, self.incarnation, worker.incarnation, code, newcomer=worker.newcomer)
        if not await self._heard(exited):
            self._unheard.append(exited)

    async def _tell_early(self) -> None:
        """See `Agent._supervise` and `Agent._await_others`: exit code 0 is the end of a script."""
        for worker in self.node.workers:
            if worker.early and worker.exit_code == 0 and worker.incarnation not in self._early:
                self._early.add(worker.incarnation)
                await self._tell(worker)
        if self._early and all(worker.exit_code == 0 for worker in self.node.workers):
            try:
                view: p.JobView = await self.client.call(p.ShowJob(self.job), timeout_s=10.0)
            except HooksError:
                return
            if all_ended(view) and view.phase is not p.Phase.BROKEN:
                self._finished = self.world.promises.exited = True

    async def _tell_again(self) -> None:
        """See `MasterRequests.tell_again`."""
        while self._unheard and await self._heard(self._unheard[0], again=False):
            del self._unheard[0]

    async def _heard(self, exited: p.Exited, *, again: bool = True) -> bool:
        try:
            await self.client.call(exited, timeout_s=2.0, again=again)
        except HooksError as error:
            self.world.tell(self.process.name, f"not heard: {exited.worker} ended ({type(error).__name__})")
            return not isinstance(error, MasterAway | JournalFailed)
        return True

    async def slander(self, incarnation: str) -> None:
        """Say that another agent's worker has ended, which is no business of this one."""
        try:
            exited = p.Exited(self.job, self.incarnation, incarnation, -9)
            await self.client.call(exited, channel="slander", timeout_s=2.0)
        except HooksError:
            return

    async def preempted(self, node: str, within_s: float) -> None:
        """A notice says that `node` is to go."""
        try:
            word = p.Preempt(self.job, self.incarnation, node, within_s, "notice")
            await self.client.call(word, channel="preempt", timeout_s=2.0)
        except HooksError:
            return

    def _undecided(self) -> list[Worker]:
        return [one for one in self.node.workers if one.exit_code is None and not one.waits]

    def _end_workers(self) -> None:
        for worker in self.node.workers:
            worker.process.kill()
        self.node.workers = []
