"""When faults happen, and those that every simulated cluster has: a node without a network, and a full disk."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from tests.simulation.host import Host
from tests.simulation.loop import Loop
from tests.simulation.network import Network


class FaultyWorld(Protocol):
    """`chance` decides what goes wrong."""

    @property
    def loop(self) -> Loop: ...
    @property
    def chance(self) -> random.Random: ...
    @property
    def network(self) -> Network: ...
    @property
    def host(self) -> Host: ...


class DrawnFaults(Protocol):
    """`every_s`: mean time between two faults. All is well again after `trouble_s`."""

    @property
    def faults(self) -> tuple[str, ...]: ...
    @property
    def every_s(self) -> float: ...
    @property
    def trouble_s(self) -> float: ...


class FaultSchedule(ABC):
    """`begin` sets it going; it stops by itself after `DrawnFaults.trouble_s`."""

    def __init__(self, world: FaultyWorld, drawn: DrawnFaults) -> None:
        self._faulty, self._drawn = world, drawn
        self.over = False

    @abstractmethod
    def _fault(self) -> None:
        """Let one fault happen."""

    @abstractmethod
    def _mend(self) -> None:
        """Everything works from now on."""

    def begin(self) -> None:
        if self._drawn.faults:
            self._faulty.loop.deliver(self._pause_s(), self._strike)
        self._faulty.loop.deliver(self._drawn.trouble_s, self._end)

    def _pause_s(self) -> float:
        return self._faulty.chance.expovariate(1.0 / self._drawn.every_s)

    def _strike(self) -> None:
        if not self.over:
            self._fault()
            self._faulty.loop.deliver(self._pause_s(), self._strike)

    def _end(self) -> None:
        self.over = True
        self._mend()

    def _later(self, low: float, high: float, call: Callable[..., object], *given: Any) -> float:
        seconds = self._faulty.chance.uniform(low, high)
        self._faulty.loop.deliver(seconds, call, *given)
        self._lasts(seconds)
        return seconds

    def _lasts(self, seconds: float) -> None:
        """What has just begun ends in so many seconds: a subclass may note that."""
        del seconds

    def _cut(self, node: str, longest_s: float) -> float:
        """The network of a node is away for so many seconds."""
        world, seconds = self._faulty, self._faulty.chance.uniform(0.5, longest_s)
        world.network.cut[node] = world.loop.now + seconds
        world.loop.deliver(seconds, lambda: world.network.cut.pop(node, None))
        self._lasts(seconds)
        return seconds

    def _fill_disk(self) -> str:
        disk = self._faulty.host.disk
        disk.full = True

        def mend() -> None:
            disk.full = False

        return f"the journal's, for {self._later(0.1, 5.0, mend):.1f} s"
