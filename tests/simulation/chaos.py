"""Harm, at random moments, of the kinds that the seed has switched on. When it stops, everything is mended."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p
from tests.simulation.agent import Agent
from tests.simulation.fault_schedule import FaultSchedule
from tests.simulation.free import FreeWorker
from tests.simulation.loop import Process
from tests.simulation.memory import Keeper
from tests.simulation.network import Connection
from tests.simulation.node import Node
from tests.simulation.swarm import INSTEAD, Level, Recovery
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.world import World


FORGETS = {"kill keeper", "stop keeper", "crash node", "replace node", "damage image", "relaunch job"}
"""Behind these a node need not hold in memory what it held: a stopped keeper hashes nothing that is saved anew."""
HARMLESS = {"kill agent", "kill worker", "relaunch job", "set clock", "slander", "worker exits", "worker fails"}
"""Attempts end by these, and an attempt that goes on makes its generations durable as before."""
OVERSIZED = (1 << 53, 1 << 63, (1 << 64) - 1, 1 << 64, 10**18)


class Chaos(FaultSchedule):
    """The faults of jobs and of the master."""

    def __init__(self, world: World) -> None:
        super().__init__(world, world.swarm)
        self.world = world
        self.quiet_from = 0.0
        """From here on (true time) nothing keeps a generation from becoming durable, unless another fault follows."""
        self._dice = random.Random(f"instead {world.swarm.seed}")
        self._frozen: list[Process] = []
        self._kinds = {
            "kill worker": self._kill_worker,
            "worker fails": self._fail_worker,
            "kill keeper": self._kill_keeper,
            "kill agent": self._kill_agent,
            "crash node": self._crash_node,
            "replace node": self._replace_node,
            "kill master": self._kill_master,
            "stop worker": lambda: self._stop_one(self._worker()),
            "stop agent": lambda: self._stop_one(self._agent()),
            "stop master": self._stop_master,
            "stop keeper": lambda: self._stop_one(self._node().keeper),
            "partition": self._partition,
            "clog": self._clog,
            "disk full": self._fill_disk,
            "storage fails": self._break_storage,
            "slow commit": self._stall_disk,
            "oversized number": self._oversize,
            "set clock": self._set_clock,
            "damage image": self._damage,
            "preempt": self._preempt,
            "slander": self._slander,
            "relaunch job": self._relaunch,
            "worker exits": self._exit_worker,
        }

    def _fault(self) -> None:
        kind = self.world.chance.choice(self.world.swarm.faults)
        other, share = INSTEAD.get(kind, ("", 0.0))
        whom = self._kinds[other]() if share and self._dice.random() < share else ""
        kind = other if whom else kind
        whom = whom or self._kinds[kind]()
        if whom:
            self.world.promises.memory_lost |= kind in FORGETS
            if kind not in HARMLESS:
                self.quiet_from = max(self.quiet_from, self.world.loop.now)
            self.world.story.fault(self.world.loop.now, kind, whom)

    def _mend(self) -> None:
        """See `FaultSchedule`."""
        world = self.world
        world.network.heal()
        world.host.disk.full = world.store.failing = False
        world.host.disk.stall_s = 0.0
        for process in self._frozen:
            process.thaw()
        world.tell("world", "all faults are over")

    def _lasts(self, seconds: float) -> None:
        self.quiet_from = max(self.quiet_from, self.world.loop.now + seconds)

    # ---- whom --------------------------------------------------------------------------------------------------------

    def _node(self) -> Node:
        return self.world.nodes[self.world.chance.choice(sorted(self.world.nodes))]

    def _worker(self) -> Worker | FreeWorker | None:
        node = self._node()
        if isinstance(node.agent, FreeWorker):
            return None if node.agent.process.dead else node.agent
        alive = [worker for worker in node.workers if not worker.process.dead]
        return self.world.chance.choice(alive) if alive else None

    def _agent(self) -> Agent | None:
        agent = self._node().agent
        return agent if isinstance(agent, Agent) and not agent.process.dead else None

    # ---- what --------------------------------------------------------------------------------------------------------

    def _kill_worker(self) -> str:
        worker = self._worker()
        if worker is None:
            return ""
        worker.process.kill()
        if isinstance(worker, FreeWorker):
            self.world.restart_agent(worker.node)
        return worker.process.name

    def _fail_worker(self) -> str:
        worker = self._worker()
        if worker is None:
            return ""
        worker.told_to_fail = True
        return worker.process.name

    def _preempt(self) -> str:
        """A worker gets the signal, all of a node get it, or the node's agent knows of it and tells the master."""
        worker, agent = self._worker(), self._agent()
        if not isinstance(worker, Worker):
            return ""
        whom, how = [worker], self.world.chance.choice(("alone", "with its node", "by a notice"))
        if how != "alone":
            whom = [one for one in self.world.nodes[worker.node].workers if not one.process.dead]
        for one in whom:
            if how != "by a notice":
                one.process.spawn(one.sigterm())
            self.world.loop.deliver(self.world.swarm.grace_s, one.process.kill)
        if how == "by a notice" and agent is not None:
            agent.process.spawn(agent.preempted(worker.node, self.world.swarm.grace_s))
        return f"{worker.process.name} {how}"

    def _slander(self) -> str:
        """An agent says that another's worker has ended."""
        worker, agent = self._worker(), self._agent()
        if not isinstance(worker, Worker) or agent is None or agent.node.name == worker.node:
            return ""
        agent.process.spawn(agent.slander(worker.incarnation))
        return f"{agent.process.name} of {worker.process.name}"

    def _kill_keeper(self) -> str:
        node = self._node()
        if node.keeper is None:
            return ""
        node.lose_keeper()
        return f"{node.name}.keeper"

    def _kill_agent(self) -> str:
        agent = self._agent()
        if agent is None:
            return ""
        agent.process.kill()
        for worker in list(agent.node.workers):
            worker.process.kill()
        self.world.restart_agent(agent.node)
        return agent.process.name

    def _relaunch(self) -> str:
        """All processes of the job are killed, often with the master, and the job is launched again, at any size."""
        world, dice = self.world, self._dice
        if world.swarm.free:
            return ""
        world.durability.relaunched()
        for node in [world.nodes[name] for name in sorted(world.nodes)]:
            if node.name in world.network.gone:
                continue
            if node.agent is not None:
                node.agent.process.kill()
                world.restart_agent(node)
            for worker in list(node.workers):
                worker.process.kill()
            node.lose_keeper()
        how = ""
        if world.host.process is not None and dice.random() < 0.5:
            how = f", the master {world.host.kill()}"
            world.loop.deliver(seconds := dice.uniform(0.1, 8.0), world.host.start)
            self._lasts(seconds)
        if dice.random() < 0.5:
            self._resize()
        return f"{world.job} with {world.swarm.workers} workers on each node{how}"

    def _resize(self) -> None:
        """Another number of workers on each node."""
        swarm, dice = self.world.swarm, self._dice
        workers = dice.choice([size for size in (1, 2, 3) if size != swarm.workers])
        most = swarm.nodes * workers
        fewest = 1 if swarm.recovery is Recovery.WORKER else workers
        least = {Level.HOT: most, Level.SHRINK: 1}.get(swarm.level) or dice.choice((most, dice.randint(fewest, most)))
        self.world.resize(workers, least)

    def _exit_worker(self) -> str:
        """The script ends its process with 0 in the middle of training, and others train on."""
        alive = [
            worker
            for name in sorted(self.world.nodes)
            for worker in self.world.nodes[name].workers
            if not worker.process.dead and worker.trains
        ]
        if len(alive) < 2:
            return ""
        worker = self._dice.choice(alive)
        worker.early = True
        worker.exit(0)
        return worker.process.name

    def _crash_node(self) -> str:
        node = self._node()
        if node.name in self.world.network.gone:
            return ""
        node.crash()
        return f"{node.name}, back in {self._later(1.0, 60.0, node.boot):.1f} s"

    def _replace_node(self) -> str:
        node = self._node()
        if node.name in self.world.network.gone:
            return ""
        node.crash()
        new = self.world.replace(node)
        return f"{node.name}, by {new.name} in {self._later(1.0, 60.0, new.boot):.1f} s"

    def _kill_master(self) -> str:
        host = self.world.host
        if host.process is None:
            return ""
        name, how = host.process.name, host.kill()
        return f"{name} {how}, next in {self._later(0.1, 8.0, host.start):.1f} s"

    def _stop(self, process: Process | None, longest_s: float = 40.0) -> str:
        if process is None or process.frozen:
            return ""
        process.freeze()
        self._frozen.append(process)
        return f"{process.name} for {self._later(0.1, longest_s, process.thaw):.1f} s"

    def _stop_master(self) -> str:
        """For minutes, though other faults may be over before."""
        said = self._stop(self.world.host.process, self.world.chance.choice((40.0, 300.0)))
        if said:
            self._frozen.pop()
        return said

    def _stop_one(self, one: Worker | FreeWorker | Agent | Keeper | None) -> str:
        return self._stop(one.process if one is not None else None)

    def _partition(self) -> str:
        node = self._node().name
        return f"{node} for {self._cut(node, 40.0):.1f} s"

    def _clog(self) -> str:
        world, node = self.world, self._node().name
        world.network.clogged[node] = factor = world.chance.choice((10.0, 100.0, 1000.0))
        self._later(1.0, 30.0, lambda: world.network.clogged.pop(node, None))
        return f"{node}, {factor:g} times slower"

    def _stall_disk(self) -> str:
        self.world.host.disk.stall_s = seconds = self.world.chance.uniform(
            0.0, self.world.chance.choice((1.0, 20.0, 200.0))
        )
        self._lasts(seconds)
        return f"the next one takes {seconds:.1f} s more"

    def _oversize(self) -> str:
        """A message of a worker, with a number that nobody can count on from."""
        world, worker, number = self.world, self._worker(), self.world.chance.choice(OVERSIZED)
        if not isinstance(worker, Worker):
            return ""
        kind, fields = self.world.chance.choice(
            (
                (p.Hold, {"passed": number}),
                (p.Heartbeat, {"step": number}),
                (p.Leave, {"reason": "done", "step": number}),
                (p.Attach, {"node": worker.node, "pid": 1, "heard": number}),
                (p.TakeLeases, {"name": "data", "fence": 1, "rate": float(number) * 1e290}),
            )
        )
        body = json.dumps({"job": world.job, "incarnation": worker.incarnation, **fields}).encode()
        sent = Connection(worker.process, worker.node, world.loop.create_future())
        world.network.host.arrive(sent, p.Routes.by_request[kind], body, None)
        return f"{kind.__name__} of {worker.process.name}, {number}"

    def _break_storage(self) -> str:
        store = self.world.store
        store.failing = True

        def mend() -> None:
            store.failing = False

        return f"for {self._later(0.5, 30.0, mend):.1f} s"

    def _set_clock(self) -> str:
        host = self.world.host
        host.offset_s += (step := self.world.chance.choice((-10_000.0, -100.0, -5.0, 5.0, 100.0, 10_000.0)))
        return f"the master's, by {step:+g} s"

    def _damage(self) -> str:
        keeper = self._node().keeper
        if keeper is None or not keeper.images:
            return ""
        key = self.world.chance.choice(sorted(keeper.images))
        keeper.images[key] = keeper.images[key]._replace(damaged=True)
        return f"seat {key[0]}, slot {key[1]} of {keeper.process.name}: {keeper.images[key].generation}"
