"""An agent whose workers speak for themselves: it starts, reaps and replaces. Stands for `launcher.agent`.

How it reads the master's view is the launcher's own: `live_on` and `ended_by_master` of `round_diagnosis`.
"""

from __future__ import annotations

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError
from dlrover_hooks.launcher.failures.round_diagnosis import ended_by_master, live_on
from tests.simulation.agent import Agent
from tests.simulation.survivor import Chair
from tests.simulation.swarm import Level
from tests.simulation.worker import Worker


class Reaper(Agent):
    """One life of such an agent."""

    _news = False
    """A break that nothing was done about yet."""

    def _notice(self, notice: p.Notice) -> None:
        self._news = self._news or (notice.broken and notice.round >= self._round)
        super()._notice(notice)

    def _outdated(self, error: HooksError) -> None:
        self._news = True
        super()._outdated(error)

    async def _until_over(self) -> None:
        """Until all workers of this node must be started again."""
        self._news = False
        while not self._finished:
            failed = [worker for worker in self.node.workers if worker.exit_code]
            news, self._news = self._news, False
            if (failed or news or self._is_done()) and not await self._mend(failed, news=news):
                return
            if not self.node.workers and not self._finished:
                await self._give_up()
            await self._rung(10.0 if self._is_done() else 30.0)

    def _is_done(self) -> bool:
        """Some worker here is: others may not be, and need it again."""
        return any(worker.exit_code == 0 for worker in self.node.workers)

    async def _mend(self, failed: list[Worker], *, news: bool) -> bool:
        """See `Agent._mend`: False if everybody must be started again."""
        try:
            view: p.JobView = await self.client.call(p.ShowJob(self.job), timeout_s=10.0)
        except HooksError:
            return False
        if view.finished:
            self._finished = True
            return True
        running = {worker.incarnation: worker for worker in self.node.workers if worker.exit_code is None}
        for name in ended_by_master(view, running):
            self.world.tell(self.process.name, f"ends {name}, which the master has lost")
            running[name].process.kill()
            failed.append(running[name])
        if not live_on(view, {worker.incarnation for worker in failed}, self._round):
            return view.phase is not p.Phase.BROKEN and not failed and not news
        for worker in (*failed, *self._needed_again(view, len(failed))):
            await self._replace(worker)
        return True

    def _needed_again(self, view: p.JobView, failed: int) -> list[Worker]:
        """Workers that were done before others failed: without them there are too few."""
        swarm, live = self.world.swarm, sum(member.alive for member in view.members)
        if view.phase is not p.Phase.BROKEN or live + failed >= swarm.bounds[0] or swarm.level is Level.SHRINK:
            return []
        return [worker for worker in self.node.workers if worker.exit_code == 0]

    async def _replace(self, worker: Worker) -> None:
        """The others live on: start a newcomer, if the fault level wants one."""
        await self._tell(worker)
        self.node.workers.remove(worker)
        local = worker.chair.local_rank
        if self.world.swarm.level is Level.SHRINK:
            self.local_ranks.remove(local)
        else:
            self._start(Chair(self.world.named("w"), local))

    async def _give_up(self) -> None:
        """Nobody is left here, and nobody is replaced. Somebody launches it again, in case all others go, too."""
        self.world.tell(self.process.name, "has no worker left")
        self.world.restart_agent(self.node)
        self.process.kill()
        await self.world.loop.create_future()
