"""A node: its keeper, and what runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.agent import Agent
from tests.simulation.free import FreeWorker
from tests.simulation.memory import Keeper
from tests.simulation.reaper import Reaper
from tests.simulation.swarm import Recovery
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.world import World


class Node:
    """One machine. `agent` None: nothing is started there, or it is down."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.keeper: Keeper | None = Keeper(world, name)
        self.agent: Agent | FreeWorker | None = None
        self.workers: list[Worker] = []

    def start_agent(self) -> None:
        """What runs on a node: its launcher; or one free worker."""
        speaks = Reaper if self.world.swarm.recovery is Recovery.WORKER else Agent
        kind = FreeWorker if self.world.swarm.free else speaks
        self.agent = kind(self.world, self)
        self.agent.start()

    def lose_keeper(self) -> None:
        """Its processes' memory is gone. A new one comes up soon."""
        if self.keeper is not None:
            self.keeper.process.kill()
            self.keeper = None
            for worker in self.workers:
                worker.engine.look()
            self.world.loop.deliver(self.world.dice.uniform(0.2, 2.0), self._new_keeper)

    def _new_keeper(self) -> None:
        if self.keeper is None and self.name not in self.world.network.gone:
            self.keeper = Keeper(self.world, self.name)

    def crash(self) -> None:
        """The machine goes down at once: no socket is closed."""
        self.world.network.gone.add(self.name)
        if self.agent is not None:
            self.agent.process.kill()
        for worker in list(self.workers):
            worker.process.kill()
        if self.keeper is not None:
            self.keeper.process.kill()
        self.workers, self.agent, self.keeper = [], None, None

    def boot(self) -> None:
        """It is back, with nothing in memory."""
        self.world.network.gone.discard(self.name)
        self.keeper = Keeper(self.world, self.name)
        self.world.start_node(self)
