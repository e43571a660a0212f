"""A preempted worker: the real `Preemption`, whose waits are awaited here, and what a session does where all leave."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError
from dlrover_hooks.worker.preemption import Preemption
from dlrover_hooks.worker.preemption_save import HastySave
from tests.simulation.survivor import Gone
from tests.simulation.threads import Idle, Turns, UnderWay

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

PAUSE_S = 0.25
WAY_OUT_S = 1.0


class _Pause:
    def wait(self, seconds: float) -> None:
        raise Idle(seconds)


class Parting(Preemption):
    """Of one worker in one round. `before`: that of the round before, in a process that has survived it."""

    def __init__(self, worker: Worker, before: Parting | None) -> None:
        super().__init__(worker.job, worker.incarnation, worker.node, worker.world.swarm.grace_s)
        self._worker, self._began, self._free = worker, 0, False
        self._pause = _Pause()  # pyright: ignore[reportAttributeAccessIssue]
        if before is not None:
            self.inherit(before)

    def begin(self, step: int) -> None:
        """Training begins there."""
        self._began = step
        self.gate.begin(step)

    def _give_up(self) -> None:
        self._free = True
        super()._give_up()

    def stay(self) -> None:
        """See `Preemption.stay`."""
        self._free = True
        super().stay()

    async def quiet_point(self) -> bool:
        """See `Session.step_end` and `_part`. True if others leave here, and this is saved, too. Raises Gone."""
        worker = self._worker
        if not await self._leaves(worker.model.step):
            return False
        await self._save()
        if not self.mine and worker.survivor is not None:
            self.stay()
            return True
        await worker.fit.close()
        with contextlib.suppress(HooksError):
            leave = p.Leave(worker.job, worker.incarnation, p.Departure.PREEMPTED, worker.model.step)
            await worker.call(leave, timeout_s=5.0)
        raise Gone(p.REQUEUE)

    async def _leaves(self, step: int) -> bool:
        worker, turns = self._worker, Turns()
        while True:
            try:
                leaves = self.leaves_at(step, turns)
            except UnderWay:
                await turns.ask(worker.call)
            except Idle as idle:
                await worker.process.sleep(idle.args[0])
            else:
                break
        if not (self._free or self.overdue):
            worker.world.promises.passed(worker.incarnation, worker.round, step, self._began if leaves else None)
        return leaves

    async def _save(self) -> None:
        """See `HastySave`: until all ranks have it, or the time is up."""
        worker = self._worker
        if not worker.model.step:
            return
        durable = worker.world.swarm.save_to is not None and not self.alone
        while not await worker.save(last=True, durable=durable):
            if self.left_s <= WAY_OUT_S:
                return
            await worker.process.sleep(PAUSE_S)
        while not self.alone and self.left_s > WAY_OUT_S and not await self._safe(durable):
            await worker.process.sleep(PAUSE_S)

    async def _safe(self, durable: bool) -> bool:
        worker, engine, post = self._worker, self._worker.engine, self._worker.post
        assert post is not None
        generation = p.Generation(engine.attempt, worker.model.step, engine.run)
        try:
            view: p.JobView = await worker.call(p.ShowJob(worker.job), timeout_s=1.0)
        except HooksError:
            return False
        real = HastySave(cast("Any", engine), post, generation, lambda: view, lambda: self.left_s)
        return real._look(durable) is not None
