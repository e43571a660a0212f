"""A parameter server job in virtual time: a launcher, tasks on three nodes, a chief, and a person who changes targets.

It has a world of its own, with the real master, network and disk of the other jobs. What is promised is compared with
what the processes really do: which of them exist, and to which servers a chief is connected.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError, Stale
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters
from dlrover_hooks.protocol import NodeStatus, NodeType
from tests.simulation.client import Client
from tests.simulation.host import Host
from tests.simulation.loop import Loop, Process
from tests.simulation.network import Network
from tests.simulation.promises import Data, Promises
from tests.simulation.story import Broken, Story
from tests.simulation.swarm import Swarm

JOB = "ps job"
NODES = ("n1", "n2", "n3")
PATIENCE_S = 1500.0
"""The job has its targets within so many seconds after the last fault."""
FOREVER_S = 1e6
READY_S = 30.0
CALM_S = 5.0


class PSPromises(Promises):
    """Also checks each announced version against the processes. Launchers and the command line are no members, so
    their requests may be applied twice."""

    ps_job: PSJob

    def applied(self, state: Any, event: Any, key: Any, entry: Any, *, now: float) -> None:
        super().applied(state, event, key, entry, now=now)
        job = state.jobs.get(JOB)
        if entry is not None and job is not None and job.ps is not None:
            self.ps_job.look(job.ps, event)

    def answered(self, key: str | None, durable: list[bytes]) -> None:
        if key is None or not key.startswith(("launcher", "person")):
            super().answered(key, durable)

    def _forget(self, state: Any, keep: int) -> None:
        super()._forget(state, keep)
        job = state.jobs.get(JOB)
        self.ps_job.goes_on(job.ps if job is not None else None)


class Task:
    """One process of the job: a server, a worker or the chief."""

    def __init__(self, job: PSJob, task: p.Task) -> None:
        self.job, self.task, self.node = job, task, NODES[task.id % len(NODES)]
        self.process = Process(f"{task.type.value}{task.index}.{task.id}", job.loop, rate=job.rate())
        self.client = Client(job.network, self.process, self.node, f"p{task.id}", FOREVER_S)
        self.address = "" if task.type is NodeType.CHIEF else f"host:{task.id}"
        self.servers: tuple[str, ...] = ()
        """Those that this chief is connected to."""
        self.code = -9

    def start(self) -> None:
        self.process.spawn(self.job.guard(self._live(), self.exit))

    def exit(self, code: int) -> None:
        if not self.process.dead:
            self.code = code
            self.process.kill()

    async def _live(self) -> None:
        task = self.task
        await self.process.sleep(self.job.dice.uniform(0.2, 5.0))
        request = p.RegisterTask(JOB, self.client.incarnation, task.type, task.index, self.address, task.id)
        await self.client.call(request)
        if task.type is NodeType.CHIEF:
            self.client.watch(JOB, lambda notice: None, lambda error: self.exit(1))
            self.process.spawn(self.job.guard(self._lead(), self.exit))
        while True:
            reply = await self.client.call(p.Heartbeat(JOB, self.client.incarnation), timeout_s=FOREVER_S)
            await self.process.sleep(max(self.job.swarm.beat_s, reply.interval_s))

    async def _lead(self) -> None:
        """The chief: connect to each version, report what cannot be reached, end when it is told to."""
        version = 0
        while not self.job.ends:
            request = p.AwaitCluster(JOB, self.client.incarnation, version, timeout_s=2.0)
            given = await self.client.call(request)
            if given.version > version:
                self.job.given(self, given.version)
                version = given.version
                await self._connect(given)
            for index, address in enumerate(self.servers):
                if self.job.dead(address):
                    why = "the connection was refused"
                    await self.client.call(p.ReportTask(JOB, self.client.incarnation, version, NodeType.PS, index, why))
        await self.client.call(p.EndTasks(JOB, self.client.incarnation))
        self.exit(0)

    async def _connect(self, given: p.PSCluster) -> None:
        before, self.servers = self.servers, given.ps
        await self.process.sleep(self.job.dice.uniform(0.1, 3.0))
        fails = any(self.job.dead(address) for address in given.ps)
        fails |= not self.job.over and self.job.dice.random() < 0.1
        if fails and not given.crash:
            self.servers = before
        why = "cannot connect" if fails else ""
        try:
            await self.client.call(p.Connected(JOB, self.client.incarnation, given.version, why))
        except Stale:  # the version is void
            return


class PSLauncher:
    """Starts what is INITIAL, kills and reaps what is FAILED, RELEASED or not listed. Its processes end with it."""

    def __init__(self, job: PSJob) -> None:
        self.job = job
        self.process = Process(name := job.named("launcher"), job.loop, rate=job.rate())
        self.client = Client(job.network, self.process, "n0", name, FOREVER_S)
        self.running: dict[int, Task] = {}

    def start(self) -> None:
        self.process.spawn(self.job.guard(self._live(), lambda code: None))

    async def _live(self) -> None:
        await self.client.call(
            p.ScaleTasks(JOB, self.client.incarnation, 2, 2, ready_within_s=READY_S, only_first=True)
        )
        shown = await self.client.call(p.ShowTasks(JOB))
        for task in shown.tasks:  # of the launcher before this one
            if task.status is not NodeStatus.INITIAL:
                await self._reaped(task.id, -9)
        while True:
            shown = await self.client.call(p.AwaitTasks(JOB, self.client.incarnation, 0, timeout_s=1.0))
            listed = {task.id: task for task in shown.tasks}
            for task in shown.tasks:
                if task.status is NodeStatus.INITIAL and task.id not in self.running and task.id not in self.job.all:
                    self.running[task.id] = self.job.started(task)
                elif task.status in (NodeStatus.FAILED, NodeStatus.RELEASED):
                    if task.id in self.running:
                        self.job.stops(self.running[task.id], task, finished=shown.finished)
                    else:
                        await self._reaped(task.id, -9)
            for number, one in list(self.running.items()):
                if number not in listed:
                    one.exit(-9)
                if one.process.dead:
                    del self.running[number]
                    await self._reaped(number, one.code)
            for number in [number for number in listed if number in self.job.all and number not in self.running]:
                await self._reaped(number, self.job.all[number].code)
            await self.process.sleep(0.3)

    async def _reaped(self, task: int, code: int) -> None:
        await self.client.call(p.Fenced(JOB, self.client.incarnation, task, code))


class PSJob:
    """One seed. `all`: every process that was started, by task id. `over`: nothing fails any more."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.dice, self.chance = random.Random(f"ps dice {swarm.seed}"), random.Random(f"ps chaos {swarm.seed}")
        self.loop, self.story = Loop(), Story()
        self.promises = PSPromises(swarm, self.loop, self.story, Data(swarm, self.dice))
        self.promises.ps_job = self
        self.network = Network(swarm, self.loop, random.Random(f"ps network {swarm.seed}"), self.story)
        dice = random.Random(f"ps master {swarm.seed}")
        self.host = self.network.host = Host(swarm, self.loop, dice, self.story, self.network, self.promises)
        self.all: dict[int, Task] = {}
        self.over = self.ends = False
        self.launcher: PSLauncher | None = None
        self._names = self._version = self._given = 0
        self._frozen: list[Process] = []
        self._acknowledged: tuple[int, ...] = ()

    # ---- what its parts ask of it ------------------------------------------------------------------------------------

    def named(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def rate(self) -> float:
        return 1.0 + self.swarm.skew * self.dice.uniform(-1.0, 1.0)

    async def guard(self, work: Coroutine[Any, Any, None], exit: Any) -> None:
        """A refusal ends the process; any other error is a bug."""
        try:
            await work
        except HooksError as error:
            self.story.tell(self.loop.now, "process", f"{type(error).__name__}: {error.message[:120]}")
            exit(1)
        except Broken:
            raise
        except Exception as error:
            self.promises.bug(error)

    def started(self, task: p.Task) -> Task:
        self.story.tell(self.loop.now, "launcher", f"starts {task.type.value}:{task.index} as task {task.id}")
        one = self.all[task.id] = Task(self, task)
        one.start()
        return one

    def stops(self, one: Task, task: p.Task, *, finished: bool) -> None:
        """The launcher kills a FAILED or RELEASED task, once it reaches its node."""
        if one.node in self.network.cut:
            return
        used = [chief.process.name for chief in self._chiefs() if one.address and one.address in chief.servers]
        good = finished or task.status is NodeStatus.FAILED or not used
        self.promises.check(good, f"{one.process.name} is released, and {used} is connected to it")
        one.exit(-9)

    def dead(self, address: str) -> bool:
        return self.all[int(address.removeprefix("host:"))].process.dead

    def _chiefs(self) -> list[Task]:
        return [one for one in self.all.values() if one.task.type is NodeType.CHIEF and not one.process.dead]

    def given(self, chief: Task, version: int) -> None:
        """A version reaches a chief."""
        self._given = max(self._given, version)
        others = [one.process.name for one in self._chiefs() if one is not chief]
        self.promises.check(not others, f"{chief.process.name} is given a version, and {others} exists")

    # ---- promises ----------------------------------------------------------------------------------------------------

    def goes_on(self, clusters: PSClusters | None) -> None:
        """A life of the master begins, or its journal refused: what was not durable has never been announced."""
        self._version = clusters.version if clusters is not None else 0
        self._acknowledged = clusters.acknowledged.ps if clusters is not None and clusters.acknowledged else ()
        said = f"a chief was given version {self._given}, and the master goes on with {self._version}"
        self.promises.check(self._version >= self._given, said)

    def look(self, clusters: PSClusters, event: Any) -> None:
        """After each event: numbers only count up, a fenced process is dead, a version is announced for a reason."""
        check = self.promises.check
        if isinstance(event, p.Fenced) and event.task in self.all:
            check(self.all[event.task].process.dead, f"task {event.task} is said to be gone")
        check(clusters.version in (self._version, self._version + 1), f"version {clusters.version} is no next one")
        if clusters.acknowledged is not None:
            self._acknowledged = clusters.acknowledged.ps
        if clusters.version > self._version:
            announced = clusters.announced
            assert announced is not None
            self._version = clusters.version
            self.story.tell(self.loop.now, "master", f"announces {announced.addresses}")
            lost = [task for task in self._acknowledged if task not in announced.ps]
            listed = {task.id for task in clusters.tasks if task.status is not NodeStatus.FAILED}
            gone = [task for task in lost if task not in listed]
            ghosts = [task for task in gone if not self.all[task].process.dead]
            check(not ghosts, f"version {clusters.version} is announced, and lost servers {ghosts} still exist")
            check(announced.addresses.crash or not gone, f"version {clusters.version} hides the loss of {gone}")

    def _settled(self) -> str:
        """What is still missing; empty: the job is what it shall be."""
        job = self.promises.state.jobs.get(JOB)
        clusters = job.ps if job is not None else None
        if clusters is None or clusters.announced is None:
            return "there is no version"
        if clusters.pending or clusters.void or clusters.growth is not None or clusters.queued is not None:
            return "a switch is under way"
        if any(task.status is not NodeStatus.RUNNING for task in clusters.tasks):
            return "tasks are neither running nor gone"
        if len(clusters.announced.ps) != clusters.ps or len(clusters.announced.workers) != clusters.workers:
            return "tasks are missing"
        return "" if all(not self.all[task.id].process.dead for task in clusters.tasks) else "a process is dead"

    # ---- harm --------------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self.over:
            return
        kinds = (self._kill, self._kill, self._stop, self._kill_launcher, self._kill_master, self._cut)
        kinds += (self._ask, self._ask, self._ask)
        what = self.chance.choice(kinds)
        if whom := what():
            self.story.fault(self.loop.now, f"ps {what.__name__.strip('_').replace('_', ' ')}", whom)
        self.loop.deliver(self.chance.expovariate(1 / 8.0), self._strike)

    def _one(self) -> Task | None:
        alive = [one for one in self.all.values() if not one.process.dead]
        return self.chance.choice(alive) if alive else None

    def _kill(self) -> str:
        one = self._one()
        if one is not None:
            one.process.kill()
        return one.process.name if one is not None else ""

    def _stop(self) -> str:
        one = self._one()
        if one is None or one.process.frozen:
            return ""
        one.process.freeze()
        self._frozen.append(one.process)
        self.loop.deliver(self.chance.uniform(0.1, 40.0), one.process.thaw)
        return one.process.name

    def _kill_launcher(self) -> str:
        old = self.launcher
        if old is None:
            return ""
        old.process.kill()
        for one in old.running.values():
            one.exit(-9)
        self.launcher = None
        self.loop.deliver(self.chance.uniform(0.1, 10.0), self._launch)
        return old.process.name

    def _launch(self) -> None:
        self.launcher = PSLauncher(self)
        self.launcher.start()

    def _kill_master(self) -> str:
        if self.host.process is None:
            return ""
        how = self.host.kill()
        self.loop.deliver(self.chance.uniform(0.1, 8.0), self.host.start)
        return how or "the master"

    def _cut(self) -> str:
        node, seconds = self.chance.choice(NODES), self.chance.uniform(0.5, 40.0)
        self.network.cut[node] = self.loop.now + seconds
        self.loop.deliver(seconds, lambda: self.network.cut.pop(node, None))
        return f"{node} for {seconds:.1f} s"

    def _ask(self) -> str:
        """A person changes the targets, or has a server moved."""
        ps, workers = self.chance.randint(1, 3), self.chance.randint(1, 3)
        name = self.named("person")
        request: p.Message = p.ScaleTasks(JOB, name, ps, workers, ready_within_s=self.chance.choice((2.0, READY_S)))
        if self.chance.random() < 0.4:
            request = p.MigrateTask(JOB, name, self.chance.choice((NodeType.PS, NodeType.WORKER)), 0, READY_S)
        process = Process(name, self.loop)
        client = Client(self.network, process, "n0", name, FOREVER_S)
        process.spawn(self.guard(client.call(request), lambda code: None))
        return f"{name}: {request}"

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Broken."""
        self.loop.deliver(0.0, self.host.start)
        self.loop.deliver(0.1, self._launch)
        self.loop.deliver(self.chance.uniform(0.0, 30.0), self._strike)
        self.loop.run(trouble_s := 120.0)
        self.over = True
        self.network.heal()
        for process in self._frozen:
            process.thaw()
        self._until(trouble_s + PATIENCE_S, lambda: self._settled())
        self.ends = True
        self._until(self.loop.now + PATIENCE_S, self._ended)

    def _ended(self) -> str:
        job = self.promises.state.jobs[JOB]
        assert job.ps is not None
        alive = [one.process.name for one in self.all.values() if not one.process.dead]
        return f"{alive} are alive, {len(job.ps.tasks)} listed" if alive or job.ps.tasks or not job.finished else ""

    def _until(self, limit: float, missing: Any) -> None:
        while self.story.broken is None and (what := missing()):
            self.promises.check(self.loop.now < limit, f"{JOB}: {what}, though nothing fails any more")
            self.loop.run(until := self.loop.now + CALM_S)
            self.loop.now = max(self.loop.now, until)
        if self.story.broken is not None:
            raise Broken(self.story.broken)

    def end(self) -> None:
        self.loop.end()
        self.host.disk.end()
