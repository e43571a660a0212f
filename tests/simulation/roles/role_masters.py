"""The real PrimeMaster and SubMasters in virtual time: their threads are greenlets, see `threadlets`."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError
from dlrover_hooks.job import prime_master, sub_master
from dlrover_hooks.job.local import process_platform
from dlrover_hooks.job.prime_master import PrimeMaster, Submission
from dlrover_hooks.job.sub_master import SubMaster
from tests.simulation.client import Client
from tests.simulation.loop import current, monotonic
from tests.simulation.roles.role_cluster import (
    PRIME,
    ClusterMasters,
    ClusterWorkers,
    HostCalls,
    PlacedProcess,
    RoleCluster,
    RoleNode,
)
from tests.simulation.story import Broken
from tests.simulation.threadlets import Bell, Event, start_thread


class BlockingClient:
    """Replaces `MasterClient`: a thread that calls it waits in virtual time."""

    def __init__(self, placed: PlacedProcess, incarnation: str) -> None:
        self.incarnation, self._placed = incarnation, placed
        world = placed.cluster.world
        self._client = Client(world.network, placed.process, placed.node.name, incarnation, 60.0)
        self._keys = 0

    def key(self, channel: str) -> str:
        """See `MasterClient.key`."""
        self._keys += 1
        return f"{self.incarnation}/{channel}/{self._keys}"

    def call(self, request: p.Message, **options: Any) -> Any:
        """See `MasterClient.call`."""
        done, outcome = Bell(self._placed.process.loop), list[Any]()

        async def work() -> None:
            try:
                outcome.append(await self._client.call(request, **options))
            except HooksError as error:
                outcome.append(error)
            done.ring()

        self._placed.process.spawn(work())
        done.wait()
        if isinstance(outcome[0], HooksError):
            raise outcome[0]
        return outcome[0]

    def close(self) -> None:
        """Does nothing: the process ends next."""


class RepeatedThreadlet:
    """Replaces `BackgroundThread` with `again_s`."""

    def __init__(self, name: str, run: Callable[[], object], *, where: str, again_s: float, **rest: object) -> None:
        del name, where, rest
        self._placed, self._run, self._again_s = _placed(), run, again_s
        self.stopping = Event(self._placed.process.loop)

    def start(self) -> None:
        start_thread(self._placed.process.loop, self._placed.process, self._live)

    def _live(self) -> None:
        while True:
            last = self.stopping.is_set()
            try:
                self._run()
                return
            except HooksError as error:
                self._placed.cluster.world.tell(self._placed.name, f"{type(error).__name__}: {error.message}")
            except Broken:
                raise
            except Exception as error:
                self._placed.cluster.world.promises.bug(error)
            if last:
                return
            self.stopping.wait(self._again_s)


class VirtualQueue:
    """Replaces `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items, self._loop = deque[Any](), current().loop
        self._bell = Bell(self._loop)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._bell.ring()

    def get(self, timeout: float | None = None) -> Any:
        while not self._items:
            self._bell = Bell(self._loop)
            if not self._bell.wait(timeout):
                raise queue.Empty
        return self._items.popleft()


class RoundlessSubMaster(SubMaster):
    """The real SubMaster without the rounds of its role. Whether the other workers recover is random."""

    def _broke_round(self, end: Any) -> bool:
        del end
        return _placed().cluster.world.recovers()

    def _exited(self, incarnation: str) -> None:
        del incarnation


class MasterProcess(PlacedProcess):
    """The process of a PrimeMaster or of a SubMaster."""

    def __init__(self, cluster: RoleCluster, name: str, node: RoleNode) -> None:
        super().__init__(cluster, name, node)
        _PLACED[self.process.name] = self
        start_thread(cluster.world.loop, self.process, self._live)

    def _live(self) -> None:
        world = self.cluster.world
        try:
            Bell(world.loop).wait(world.dice.uniform(0.1, 1.5))
            self._prime() if self.name == PRIME else self._sub_master()
        except HooksError as error:
            world.tell(self.name, f"fails: {type(error).__name__}: {error.message}")
            self.exit(1)
        except Broken:
            raise
        except Exception as error:
            world.promises.bug(error)
        else:
            self.exit(0)

    def _prime(self) -> None:
        world = self.cluster.world
        client: Any = BlockingClient(self, world.named("prime"))
        address = process_platform.LocalAddress("", "", "")
        platform = ClusterMasters(address, world.spec)
        platform.cluster = self.cluster
        PrimeMaster(Submission(world.spec, world.submission, ""), client, platform, world.look).run()

    def _sub_master(self) -> None:
        world, role = self.cluster.world, self.name.removeprefix("sub-master/")
        address = process_platform.LocalAddress("", "", "")
        platform = ClusterWorkers(address, world.spec, role, "")
        platform.cluster = self.cluster
        RoundlessSubMaster(Submission(world.spec, world.submission, ""), role, "", platform).run()


_PLACED = dict[str, MasterProcess]()
"""By the name of the process: the masters of the current seed."""


def _placed() -> MasterProcess:
    """The master whose process runs at the moment."""
    return _PLACED[current().name]


def _client_of(*_: object, incarnation: str = "") -> BlockingClient:
    placed = _placed()
    return BlockingClient(placed, incarnation or placed.cluster.world.named("sub"))


def _host_calls(path: str) -> HostCalls:
    del path
    return HostCalls(_placed().cluster)


class _Time:
    monotonic = staticmethod(monotonic)


class _Queue:
    SimpleQueue, Empty = VirtualQueue, queue.Empty


_STAND_INS: dict[tuple[Any, str], Any] = {
    (sub_master, "BackgroundThread"): RepeatedThreadlet,
    (sub_master, "MasterClient"): _client_of,
    (sub_master, "client_of"): _client_of,
    (sub_master, "queue"): _Queue,
    (sub_master, "time"): _Time,
    (prime_master, "BackgroundThread"): RepeatedThreadlet,
    (prime_master, "time"): _Time,
    (process_platform, "CallClient"): _host_calls,
}


@contextmanager
def virtual_masters() -> Iterator[None]:
    """Within the context both masters use virtual threads, clocks, queues and clients, and nothing is logged."""
    before = {place: getattr(*place) for place in _STAND_INS}
    logging.disable(logging.CRITICAL)
    _PLACED.clear()
    for (module, name), stand_in in _STAND_INS.items():
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for (module, name), real in before.items():
            setattr(module, name, real)
        logging.disable(logging.NOTSET)
