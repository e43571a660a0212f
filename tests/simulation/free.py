"""Workers that no agent starts, and that hold no seat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError, Stale
from dlrover_hooks.protocol import LedgerState
from tests.simulation.client import Client
from tests.simulation.fit import Fit
from tests.simulation.loop import Process
from tests.simulation.threads import Lender

if TYPE_CHECKING:
    from tests.simulation.node import Node
    from tests.simulation.world import World


class FreeWorker:
    """A process without a seat: it leases, trains and acknowledges at its own pace. Started again when it dies."""

    def __init__(self, world: World, node: Node) -> None:
        self.world, self.node, self.job = world, node, world.job
        self.incarnation = world.named("free")
        self.process = Process(f"{node.name}.{self.incarnation}", world.loop, rate=world.rate())
        self.client = Client(world.network, self.process, node.name, self.incarnation, 60.0)
        self.call = self.client.call
        self.told_to_fail = False
        self.exit_code: int | None = None

    def start(self) -> None:
        self.process.spawn(self._live())

    async def _live(self) -> None:
        try:
            await self._work()
        except HooksError as error:
            self.world.tell(self.process.name, f"ends with {type(error).__name__}: {error.message[:120]}")
            self.process.kill()
            self.world.restart_agent(self.node)
        except Exception as error:
            self.world.promises.bug(error)

    async def _work(self) -> None:
        fit = self.fit = Fit(self, free=True)  # pyright: ignore[reportArgumentType]
        await fit.open()
        self.client.watch(self.job, lambda notice: None, lambda error: None)
        for epoch in range(self.world.swarm.epochs):
            if await fit.finished(epoch):
                continue
            lender = fit.borrow(epoch)
            while not (lender.state is LedgerState.FINISHED and not lender.ready):
                await self._step(fit, lender)
            await fit.close()
        self.world.promises.free_done(self.job)
        await self.call(p.Leave(self.job, self.incarnation, p.Departure.DONE), timeout_s=5.0)
        self.world.done(self.node)
        self.process.kill()

    async def _step(self, fit: Fit, lender: Lender) -> None:
        if self.told_to_fail:
            raise Stale("an exception in the script")
        piece = fit.pull()
        if piece is None:
            lender.surface()
            await lender.wait_for(1.0)
            return
        await self.process.sleep(self.world.swarm.step_s * self.world.dice.uniform(0.5, 1.5))
        self.world.promises.saw(fit.mask(piece))
        fit.tally.received(piece)
        fit.tally.mark()
        fit.commit()
