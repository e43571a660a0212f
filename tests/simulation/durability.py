"""How old what storage has may be at most, at any moment at which everything may be killed and launched again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_hooks.master.core.checkpoints.save_votes import seconds

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

SAVE_S = 5.0
"""A generation is durable so long after its step, and a heartbeat: hashed in 0.3 s, written in 3, committed in 0.6."""


class Durability:
    """Of one job at a time, over all its attempts and launches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.relaunches = 0
        self.new_job()

    def new_job(self) -> None:
        """What is known is of the one before."""
        self._attempt, self._began, self._between = 0, 0.0, 0
        self._steps: list[tuple[float, int]] = []
        """When (true time) each step was over, as far as it is still in the model."""

    def begun(self, worker: Worker) -> None:
        """A rank trains on from here; the first one counts."""
        if worker.engine.attempt <= self._attempt:
            return
        self._attempt, self._began, self._between = worker.engine.attempt, self._world.loop.now, 0
        self._steps = [one for one in self._steps if one[1] <= worker.model.step]

    def stepped(self, worker: Worker) -> None:
        """A step is over, and saved if that was due."""
        step = worker.model.step
        if worker.engine.attempt != self._attempt:
            return
        every = worker.longest or (step - worker.begun_at) // 2
        self._between = max(self._between, every + 1)
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((self._world.loop.now, step))
        self.check()

    def relaunched(self) -> None:
        """All processes are about to be killed: what storage has is all that is left."""
        self.relaunches += 1
        self.check()

    def check(self) -> None:
        """What storage has is not older than `persist_every`, the steps between two saves, and the time of two saves.

        Two, since one that is under way when the next is due comes first. Faults that keep a save from storage begin
        this time again, and so does an attempt.
        """
        world, swarm = self._world, self._world.swarm
        if swarm.save_to is None or swarm.free or swarm.loss or swarm.late or not self._steps:
            return
        before = world.loop.now - 2 * (SAVE_S + swarm.longest_beat_s + 10 * swarm.latency_s)
        if max(self._began, world.chaos.quiet_from) > before:
            return
        every = swarm.persist_every
        steps = every if isinstance(every, int) else 0
        before -= 0.0 if isinstance(every, int) else seconds(every) * (1 + swarm.skew)
        old = max((step for at, step in self._steps if at <= before), default=0)
        durable = max(world.store.manifests, default=None)
        has = durable.step if durable is not None else 0
        late = f"step {old} was over at {before:.1f}, and storage has step {has}, persist_every {every}"
        world.promises.check(has >= old - steps - self._between, late)
