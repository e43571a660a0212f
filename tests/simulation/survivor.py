"""A worker that speaks for itself: it keeps its process when its round breaks, saves what it has, and joins again.

Stands for `elastic_run` (`elastic.in_process_recovery`, `worker.surviving_process`, `worker.round_join`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError, MasterAway
from tests.simulation.group import Aborted
from tests.simulation.model import Model

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

FORM_S = 900.0
LOOK_S = 1.0
"""Between two looks at the members of a round that may lack one."""
FAULT_S = 5.0
"""How long the master's word is waited for once something failed that a lost peer may have caused."""


class Chair(p.Message, frozen=True):
    """The seat of a process. `round` 0: it has none yet, and asks for one."""

    incarnation: str
    local_rank: int
    rank: int = 0
    world_size: int = 0
    prefix: str = ""
    round: int = 0


class Gone(Exception):
    """The process ends with exit code `args[0]`."""


class Crowded(Aborted):
    """Newcomers wait: the round is left where a step ends."""


class Kept(NamedTuple):
    """What a step boundary of this round left behind."""

    generation: p.Generation
    model: Model
    state: dict[str, Any]


class Survivor:
    """Of one process. `launcher`: what reaps it."""

    def __init__(self, worker: Worker, launcher: str) -> None:
        self._worker, self._world, self._launcher = worker, worker.world, launcher
        self._kept: Kept | None = None

    def quiet_point(self) -> None:
        """A step is whole. Raises Crowded."""
        worker, engine = self._worker, self._worker.engine
        generation = p.Generation(engine.attempt, worker.model.step, engine.run)
        self._kept = Kept(generation, worker.model, worker.fit.state())
        self._world.progress.quiet_point(worker, generation)
        if worker.waiting:
            raise Crowded

    async def regroup(self, error: Aborted | HooksError) -> None:
        """Go on in the next round. Raises `error` if the master knows of no break, Gone if the job is over."""
        worker = self._worker
        if not isinstance(error, Crowded) and not await self._hears_break():
            raise error
        if worker.group is not None:
            worker.group.left(worker.chair.rank, silent=False)
            worker.group = None
        if not self._world.swarm.leased and self._world.dice.random() < 0.8:
            await self._salvage()
        await worker.fit.close()
        if worker.post is not None:
            worker.post.end()
        worker.engine.attempt = 0  # what is heard of saves of the round that ended is nothing to the next one
        self._kept = None
        await self.take_seat()
        worker.survives = True
        model_s = 15.0 if self._world.dice.random() < 0.05 else 1.0
        await worker.process.sleep(self._world.dice.uniform(0.01, model_s))

    async def _hears_break(self) -> bool:
        worker, clock = self._worker, self._worker.process.clock
        deadline = clock() + FAULT_S
        while worker.notices < max(worker.round, 1) and clock() < deadline:
            if await worker.heard.wait(min(LOOK_S, deadline - clock())):
                worker.heard.pop()
            elif await self._sees_exit():
                return True
        return worker.notices >= max(worker.round, 1)

    async def _sees_exit(self) -> bool:
        """A member's process has ended with 0, which breaks no round: those that wait for it have to say so."""
        worker = self._worker
        try:
            view: p.JobView = await worker.call(p.ShowJob(worker.job), timeout_s=1.0)
        except HooksError:
            return False
        return view.round == worker.round and any(one.gone == "exited" for one in view.members)

    async def _salvage(self) -> None:
        """A lone image: the state of the last step boundary, as that of a world of one."""
        kept, worker = self._kept, self._worker
        if kept is not None and await worker.engine.save_lone(worker.process, *kept):
            self._world.progress.saved(worker, kept.generation)

    async def take_seat(self) -> None:
        """See `runtime.seat.take_seat`: join, and wait for a round. Raises HooksError, Gone."""
        worker, swarm = self._worker, self._world.swarm
        local = worker.chair.local_rank
        low, high = swarm.bounds
        join = p.Join(
            job=worker.job,
            incarnation=worker.incarnation,
            node=worker.node,
            seats=(p.Seat(worker.incarnation, local),),
            host=worker.node,
            port=29500,
            min_workers=low,
            max_workers=high,
            proposed_run=f"run of {worker.incarnation}",
            launcher=self._launcher,
        )
        joined: p.Joined = await worker.call(join, timeout_s=FORM_S)
        if joined.finished:
            raise Gone(0)
        deadline, seated = worker.process.clock() + FORM_S, p.Seated()
        while seated.round is None:
            if worker.parting is not None and worker.parting.overdue:
                raise Gone(p.REQUEUE)
            if worker.process.clock() > deadline:
                raise MasterAway("no round formed in time")
            ask = p.AwaitRound(worker.job, worker.incarnation, after=worker.round, timeout_s=5.0)
            seated = await worker.call(ask, timeout_s=FORM_S)
        chair = Chair(worker.incarnation, local, seated.ranks[0], seated.world_size, seated.store_prefix, seated.round)
        worker.chair, worker.round, worker.waiting = chair, seated.round, 0
