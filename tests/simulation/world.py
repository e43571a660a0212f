"""One seed, from the first join to the end of the job."""

from __future__ import annotations

import gc
import logging
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased import lease_client
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.worker import preemption, reporter
from tests.simulation.chaos import Chaos
from tests.simulation.durability import Durability
from tests.simulation.group import Group
from tests.simulation.host import Host
from tests.simulation.loop import Loop, monotonic
from tests.simulation.memory import Keeper, Store
from tests.simulation.network import Network
from tests.simulation.node import Node
from tests.simulation.progress import Progress
from tests.simulation.promises import Data, Promises
from tests.simulation.ps_job import PSJob
from tests.simulation.story import Broken, Story
from tests.simulation.swarm import Swarm, draw
from tests.simulation.worker import Worker

LEAST = 200
"""Each seed runs so many events: job after job, until it has."""
PATIENCE_S = 6000.0
"""A job ends within so many seconds (and its work) after the last fault."""


class Result(NamedTuple):
    """What one seed gave. `broken`: the promise that was, None if none was."""

    seed: int
    events: int
    hours: float
    faults: dict[str, int]
    trace: int
    jobs: int
    broken: str | None
    story: str
    command: str = "make simulate"

    @property
    def report(self) -> str:
        """For the reader that has to mend it."""
        again = f"replay it with: {self.command} SEEDS={self.seed}:{self.seed}"
        return f"{self.story}\nseed {self.seed}: {self.broken}\n{again}"


class World:
    """All that is simulated. `dice` decides what anybody does, `chance` what goes wrong."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.dice = random.Random(f"dice {swarm.seed}")
        self.chance = random.Random(f"chaos {swarm.seed}")
        self.loop, self.story = Loop(), Story()
        self.data = Data(swarm, self.dice)
        self.promises = Promises(swarm, self.loop, self.story, self.data)
        self.progress = self.promises.progress = Progress(self)
        self.durability = Durability(self)
        self.network = Network(swarm, self.loop, random.Random(f"network {swarm.seed}"), self.story)
        self.host = self.network.host = Host(
            swarm, self.loop, random.Random(f"master {swarm.seed}"), self.story, self.network, self.promises
        )
        self.store = self.host.store = Store(self.dice, self.promises)
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, Group] = {}
        self.job = ""
        self.chaos = Chaos(self)
        self._names = 0
        self._done: set[str] = set()
        self.jobs = 0

    # ---- what its parts ask of it ------------------------------------------------------------------------------------

    def named(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def rate(self) -> float:
        return 1.0 + self.swarm.skew * self.dice.uniform(-1.0, 1.0)

    def tell(self, who: str, what: str) -> None:
        self.story.tell(self.loop.now, who, what)

    def group(self, prefix: str) -> Group:
        if prefix not in self.groups:
            self.groups[prefix] = Group(self.loop, self.dice, self.promises, prefix)
        return self.groups[prefix]

    def keeper_at(self, address: p.KeeperAddress) -> Keeper | None:
        node = self.nodes.get(address.node)
        keeper = node.keeper if node is not None else None
        return keeper if keeper is not None and not keeper.process.dead and not keeper.process.frozen else None

    def connected(self, one: str, other: str) -> bool:
        return not {one, other} & (self.network.cut.keys() | self.network.gone)

    def stored(self) -> tuple[p.Manifest, ...]:
        """What rank 0 finds in storage. Raises StorageFailed."""
        if self.store.failing:
            raise StorageFailed("the store does not answer")
        found = [one for one in self.store.manifests.values() if one.job == self.job]
        return tuple(msgspec.structs.replace(one, files=()) for one in found)

    def exited(self, worker: Worker) -> None:
        """Its agent's waitpid."""
        agent = self.nodes[worker.node].agent if worker.node in self.nodes else None
        bell = getattr(agent, "bell", None)
        if bell is not None:
            bell.put("exit")

    def start_node(self, node: Node) -> None:
        if node.name in self.nodes and node.agent is None:
            node.start_agent()

    def restart_agent(self, node: Node) -> None:
        """Somebody starts the launcher again."""
        self.loop.deliver(self.dice.uniform(0.1, 10.0), self._restart, node, node.agent)

    def _restart(self, node: Node, dead: Any) -> None:
        if node.agent is dead and self.nodes.get(node.name) is node:
            node.start_agent()

    def resize(self, workers: int, least: int) -> None:
        """Agents that start from now on have so many workers each, and rounds `least` at least."""
        self.swarm = msgspec.structs.replace(self.swarm, workers=workers, min_workers=least)
        self.promises.most = self.swarm.bounds[1]

    def replace(self, node: Node) -> Node:
        del self.nodes[node.name]
        new = Node(self, self.named("n"))
        new.keeper = None
        self.network.gone.add(new.name)
        self.nodes[new.name] = new
        return new

    def done(self, node: Node) -> None:
        """Nothing is left to do there."""
        self._done.add(node.name)
        if self._done >= self.nodes.keys() or self.promises.over(self.job) or self.promises.exited:
            self.loop.stopped = True

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Broken."""
        self.loop.deliver(0.0, self.host.start)
        for _ in range(self.swarm.nodes):
            name = self.named("n")
            self.nodes[name] = Node(self, name)
        self.chaos.begin()
        while not self.jobs or (self.story.events < LEAST and self.story.broken is None):
            self._one_job()
        if self.story.broken is not None:
            raise Broken(self.story.broken)

    def _one_job(self) -> None:
        self.jobs += 1
        self.job, self._done = f"job{self.jobs}", set()
        self.store.files.clear()
        self.store.manifests.clear()
        self.promises.new_job(self.job)
        self.progress.new_job()
        self.durability.new_job()
        for node in list(self.nodes.values()):
            if node.name not in self.network.gone:
                if node.keeper is not None:
                    node.keeper.process.kill()
                node.keeper = Keeper(self, node.name)
                node.start_agent()
        began = self.loop.now
        work_s = self.swarm.step_s * self.data.size * 4
        self.loop.stopped = False
        self.loop.run(began + max(self.swarm.trouble_s, began) + PATIENCE_S + work_s)
        if self.story.broken is None:
            self.promises.check(self.loop.stopped, f"{self.job} does not end, though nothing fails any more")
            self.promises.ended(self.job)
        for node in self.nodes.values():
            if node.agent is not None:
                node.agent.process.kill()
            for worker in list(node.workers):
                worker.process.kill()
            node.workers = []

    def finish(self) -> Result:
        """Run, and say how it went."""
        try:
            self.run()
        except Broken:
            pass
        except Exception as error:
            self.promises.bug(error)
        story, hours = self.story, self.loop.now / 3600
        text = f"{self.swarm}\n{story.text()}\n"
        return Result(self.swarm.seed, story.events, hours, story.faults, story.trace, self.jobs, story.broken, text)

    def end(self) -> None:
        self.loop.end()
        self.host.disk.end()


class _Vitals:
    def __init__(self, where: str) -> None:
        pass

    def sample(self) -> p.Vitals:
        return p.Vitals()

    def stop(self) -> None:
        pass


class _Time:
    monotonic = staticmethod(monotonic)


@contextmanager
def _virtual() -> Iterator[None]:
    """While a world runs the worker's threads tell the time by their process, and the log is quiet."""
    before = lease_client.time, preemption.time, reporter.time, reporter.Sampler
    lease_client.time = preemption.time = reporter.time = _Time  # pyright: ignore[reportAttributeAccessIssue]
    reporter.Sampler = _Vitals  # pyright: ignore[reportAttributeAccessIssue]
    logging.disable(logging.CRITICAL)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        lease_client.time, preemption.time, reporter.time, reporter.Sampler = before
        logging.disable(logging.NOTSET)
        if collects:
            gc.enable()


def simulate(seed: int) -> Result:
    """Run one seed. Every tenth one has a parameter server job, too."""
    with _virtual():
        world = World(draw(seed))
        try:
            result = world.finish()
        finally:
            world.end()
        return result if result.broken or seed % 10 else _with_ps_job(result)


def _with_ps_job(result: Result) -> Result:
    job = PSJob(draw(result.seed))
    try:
        job.run()
    except Broken:
        pass
    except Exception as error:
        job.promises.bug(error)
    finally:
        job.end()
    story = job.story
    return result._replace(
        events=result.events + story.events,
        hours=result.hours + job.loop.now / 3600,
        faults={**result.faults, **story.faults},
        trace=zlib.crc32(str(story.trace).encode(), result.trace),
        jobs=result.jobs + 1,
        broken=story.broken,
        story=f"{job.swarm}\n{story.text()}\n" if story.broken is not None else result.story,
    )
