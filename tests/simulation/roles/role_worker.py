"""One worker process: replaces `dlrover_hooks.job.worker_process.Worker` and the process around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError, MasterAway, MasterError
from dlrover_hooks.job.worker_process import _AWAY_S, _BEAT_S, Outcome, WorkerPlace
from dlrover_hooks.protocol import AGAIN, WorkerCause
from tests.simulation.client import Client
from tests.simulation.roles.role_cluster import PlacedProcess, RoleCluster, RoleNode
from tests.simulation.story import Broken

if TYPE_CHECKING:
    from tests.simulation.roles.role_books import Life


class RoleProcess(PlacedProcess):
    """Registers, sends heartbeats, keeps its watch open, and runs its function: for some seconds, or until the job is
    over. `outcome`: the outcome of the function, once it has ended.
    """

    def __init__(self, cluster: RoleCluster, name: str, node: RoleNode, place: WorkerPlace) -> None:
        super().__init__(cluster, name, node)
        self.place = place
        self.life: Life = (place.role, place.rank, place.life)
        self.outcome: Outcome | None = None
        self.registered = False
        world = cluster.world
        self.client = Client(world.network, self.process, node.name, world.named("w"), 60.0)
        self._end: asyncio.Future[Outcome] = world.loop.create_future()
        self._beats = True
        self.process.spawn(self._guarded(self._live))

    @property
    def incarnation(self) -> str:
        return self.client.incarnation

    def ends(self, outcome: Outcome) -> None:
        """End the function with this outcome, unless it has ended before."""
        if not self._end.done():
            self._end.set_result(outcome)

    # ---- the process -------------------------------------------------------------------------------------------------

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        world = self.cluster.world
        try:
            await work()
        except MasterError as error:
            world.tell(self.name, f"{type(error).__name__}: {error.message}")
            self.exit(AGAIN)
        except MasterAway:
            self.exit(1)
        except Broken:
            raise
        except Exception as error:
            world.promises.bug(error)

    async def _live(self) -> None:
        world, place = self.cluster.world, self.place
        await self.process.sleep(world.boot_s())
        await self.client.call(p.ShowRoles(place.job), timeout_s=_AWAY_S)
        event = p.RegisterWorker(
            place.job, self.incarnation, place.role, place.rank, place.life, self.node.name, 1, self.name
        )
        try:
            await self.client.call(event, timeout_s=_AWAY_S)
        except MasterError as error:
            self._leave_outcome(Outcome(WorkerCause.KILLED, f"the master refused it: {error.message}"))
            return
        self.registered = True
        self.process.spawn(self._guarded(self._beat))
        self.client.watch(place.job, self._noticed, self._refused)
        outcome = await self._run()
        self.outcome = outcome
        self._beats = False
        with contextlib.suppress(HooksError):
            await self.client.call(p.Leave(place.job, self.incarnation, p.Departure.STOPPED), timeout_s=_BEAT_S)
        self._leave_outcome(outcome)

    async def _run(self) -> Outcome:
        """The function of the role."""
        world = self.cluster.world
        if (seconds := world.works_s(self.place.role)) is not None:
            world.loop.call_later(seconds, self.ends, Outcome())
        return await self._end

    def _leave_outcome(self, outcome: Outcome) -> None:
        self.outcome = self.cluster.outcomes[self.name] = outcome
        self.exit(0 if outcome.cause is None else 1)

    async def _beat(self) -> None:
        heard = self.process.clock()
        while self._beats:
            try:
                await self.client.call(p.Heartbeat(self.place.job, self.incarnation), timeout_s=_BEAT_S)
                heard = self.process.clock()
            except MasterAway:
                if self.process.clock() > heard + _AWAY_S:
                    self.exit(AGAIN)
            except MasterError as error:
                self._refused(error)
                return
            await self.process.sleep(_BEAT_S)

    def _noticed(self, notice: p.Notice) -> None:
        if notice.finished and not self.cluster.world.drives(self.place.role):
            self.ends(Outcome())

    def _refused(self, error: HooksError) -> None:
        if self._beats:
            self.cluster.world.tell(self.name, f"ends: {error.message}")
            self.exit(AGAIN)
