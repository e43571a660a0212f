"""A job whose nodes the master plans, in virtual time: its core and its `JobManager`, with nodes that fail, hang or
come late, and a speed that depends on the number of workers.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import random
from collections.abc import Callable

import msgspec

from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core import events, heartbeats, job_registry, node_vitals
from dlrover_hooks.master.core.effects import PlanDue
from dlrover_hooks.master.core.events import Envelope
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling, desired
from dlrover_hooks.master.planning import local_optimizer
from dlrover_hooks.master.scaling.job_manager import JobManager
from dlrover_hooks.master.scaling.job_resource_optimizer import JobResourceOptimizer, situation
from dlrover_hooks.protocol import (
    Departure,
    Join,
    Leave,
    Message,
    Node,
    NodeChange,
    NodeExit,
    NodeResource,
    NodeVitals,
    ReportNodes,
    ResourceLimits,
    ScalingMode,
    ScalingPace,
    Seat,
    StartScaling,
)
from dlrover_hooks.protocol.vitals_messages import CPUVitals, MemoryVitals, NetworkVitals, WorkerProcesses

JOB = "job"
BEAT_S = 1.0
MIB = 1 << 20


class Faults(msgspec.Struct, frozen=True):
    """Of the nodes of one job. Shares are between 0 and 1."""

    start_s: tuple[float, float] = (1.0, 5.0)
    """A node starts within this range."""
    hangs: float = 0.0
    """Share of the nodes that never start."""
    fails_every_s: float = float("inf")
    """Mean time between two failures of running nodes."""
    noise: float = 0.0
    """Of the speed, within each second."""
    out_of_memory_above: int = 0
    """A worker with less MiB is killed for memory soon after its start. 0: none is."""


class PlannedJob(abc.ABC):
    """Virtual time; nothing waits. The master's part of it, without the nodes."""

    def __init__(self, request: StartScaling, seed: int, faults: Faults) -> None:
        self.faults, self.random = faults, random.Random(seed)
        self.state, self.nodes, self.now = job_registry.Master(), Nodes(), 1000.0
        self.manager = JobManager(JOB, JobResourceOptimizer(local_optimizer))
        self.journal: list[bytes] = []
        self.steps = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._planning = False
        self.apply(request)
        self.after(BEAT_S, self._beat)
        self.after(request.pace.window_s, self._window)
        if self.faults.fails_every_s < float("inf"):
            self.after(self.random.expovariate(1 / self.faults.fails_every_s), self._fail_one)

    @abc.abstractmethod
    def _follow(self) -> None:
        """Start and remove nodes as a launcher does."""

    @abc.abstractmethod
    def _beat(self) -> None:
        """Make the steps of a second, and send heartbeats and reports."""

    @abc.abstractmethod
    def _fail_one(self) -> None:
        """A node ends by a failure."""

    @property
    def scaling(self) -> JobScaling:
        found = self.state.jobs[JOB].scaling
        assert found is not None
        return found

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), call))

    def run(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
            self.check()
        self.now = until

    def apply(self, event: Message) -> None:
        """Apply an event, through its journaled form, and do what follows from it."""
        record = events.encode(Envelope(now=self.now, event=event))
        outcome = job_registry.apply(self.state, events.decode(record).event, self.now)
        self.journal.append(record)
        job = self.state.jobs[JOB]
        if job.alarm < float("inf"):
            self.after(max(0.0, job.alarm - self.now), self._tick)
        self._follow()
        if any(isinstance(effect, PlanDue) for effect in outcome.effects):
            self._plan()

    def replayed(self) -> bytes:
        """The state that a restarted master gets from the journal."""
        state = job_registry.Master()
        for record in self.journal:
            envelope = events.decode(record)
            job_registry.apply(state, envelope.event, envelope.now, envelope.key)
        return job_registry.encode(state)

    def check(self) -> None:
        """What holds at all times."""
        scaling = self.scaling
        open_plans = [one for one in scaling.history.records if one.outcome.value in ("starting", "measuring")]
        assert len(open_plans) <= 1, "two plans at a time"
        assert scaling.finished or len(scaling.present) + scaling.succeeded <= scaling.limits.max_workers
        names = [node.shown.name for node in scaling.nodes]
        assert len(names) == len(set(names)), "two nodes of one name"

    # ---- what the shell of the master does ----

    def _window(self) -> None:
        job = self.state.jobs[JOB]
        event = self.manager.sample(self.nodes, job, self.scaling)
        if event is not None:
            self.apply(event)
        else:
            self._plan()
        self.after(self.scaling.history.pace.window_s, self._window)

    def _plan(self) -> None:
        if self._planning:  # the event below asks for the next plan
            return
        self._planning = True
        try:
            event = self.manager.plan(situation(self.state.jobs[JOB], self.scaling, self.now), self.now)
        finally:
            self._planning = False
        if event is not None:
            try:
                self.apply(event)
            except Stale:
                return

    def _tick(self) -> None:
        job = self.state.jobs[JOB]
        if job.alarm <= self.now:
            self.apply(events.Tick(JOB))


class ScaledJob(PlannedJob):
    """An all-reduce job. `speed`: steps per second by the number of workers. `size`: of each, as its user gave it."""

    def __init__(
        self,
        speed: Callable[[int], float],
        limits: ResourceLimits,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        mode: ScalingMode = ScalingMode.SINGLE_JOB,
        pace: ScalingPace | None = None,
        relaunches: int = 1 << 20,
        size: NodeResource | None = None,
    ) -> None:
        self.speed, self.started, self.running = speed, dict[str, Node](), dict[str, str]()
        """Every node that was ever started, by name; the incarnation in the round of each that runs, by name."""
        self.counts: list[tuple[float, int]] = []
        """When the number of running nodes changed, and to what."""
        self._lives = itertools.count()
        pace = pace or ScalingPace()
        sizes = {} if size is None else {"worker": size}
        request = StartScaling(JOB, "launcher", mode, limits, pace=pace, relaunches=relaunches, sizes=sizes)
        super().__init__(request, seed, faults or Faults())

    def _follow(self) -> None:
        wanted = {node.name: node for node in desired(self.scaling).nodes}
        for name, node in wanted.items():
            if name not in self.started:
                self.started[name] = node
                if self.random.random() >= self.faults.hangs:
                    self.after(self.random.uniform(*self.faults.start_s), lambda name=name: self._started(name))
        for name in set(self.running) - set(wanted):
            self.after(0.0, lambda name=name: self.end(name, NodeExit.REMOVED))

    def _started(self, name: str) -> None:
        if name not in {node.shown.name for node in self.scaling.present}:
            return
        self.running[name] = ""
        self._regroup()
        self.apply(ReportNodes(JOB, "launcher", (NodeChange(name),)))
        size = self.started[name].config_resource.memory
        if 0 < size < self.faults.out_of_memory_above:
            self.after(20.0, lambda: self.end(name, NodeExit.OUT_OF_MEMORY, 137))

    def end(self, name: str, cause: NodeExit, code: int = 0, detail: str = "") -> None:
        """A node ends."""
        if name in self.running:
            self.apply(Leave(JOB, self.running.pop(name), Departure.FAILED))
            self._regroup()
            self.apply(ReportNodes(JOB, "launcher", (NodeChange(name, cause, code, detail),)))

    def _fail_one(self) -> None:
        if self.running:
            self.end(self.random.choice(sorted(self.running)), NodeExit.KILLED, 137)
        self.after(self.random.expovariate(1 / self.faults.fails_every_s), self._fail_one)

    def _regroup(self) -> None:
        """A new round of the nodes that run."""
        self.counts.append((self.now, len(self.running)))
        for incarnation in self.running.values():
            if incarnation:
                self.apply(Leave(JOB, incarnation, Departure.PREEMPTED))
        for name in sorted(self.running):
            self.running[name] = life = f"{name}#{next(self._lives)}"
            self.apply(
                Join(
                    JOB, life, name, (Seat(life, 0),), "127.0.0.1", 1, len(self.running), len(self.running), "run",
                    last_call_s=0.0, agents=True,
                )
            )  # fmt: skip

    def _beat(self) -> None:
        count = len(self.running)
        noise = 1 + self.faults.noise * self.random.gauss(0, 1)
        self.steps += BEAT_S * self.speed(count) * max(0.0, noise) if count else 0.0
        for name, life in self.running.items():
            heartbeats.beat(self.nodes, (JOB, life), self.now, step=int(self.steps))
            workers = (WorkerProcesses(life, 1, 90.0, 700 * MIB),)
            usage = CPUVitals(8, 1.0, (1.0, 1.0, 1.0)), MemoryVitals(1 << 34, 1 << 33), NetworkVitals(0.0, 0.0)
            report = NodeVitals(JOB, life, name, *usage, workers=workers)
            node_vitals.keep(self.nodes, report, self.now)
        self.after(BEAT_S, self._beat)
