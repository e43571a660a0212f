"""A parameter server job whose tasks the master plans, in virtual time: a chief, servers that hold a part of the model
each and are as fast as their cores, and workers.
"""

from __future__ import annotations

import contextlib

import msgspec

from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core import heartbeats, node_vitals
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters, find, live_chief
from dlrover_hooks.master.core.ps_clusters.task_states import TaskRecord
from dlrover_hooks.protocol import (
    Connected,
    Fenced,
    NodeResource,
    NodeStatus,
    NodeType,
    NodeVitals,
    RegisterTask,
    ResourceLimits,
    ScalingMode,
    ScalingPace,
    StartScaling,
)
from dlrover_hooks.protocol.vitals_messages import CPUVitals, MemoryVitals, NetworkVitals, WorkerProcesses
from tests.simulation.scaled_job import BEAT_S, JOB, MIB, Faults, PlannedJob

CONNECT_S = 3.0


class Model(msgspec.Struct, frozen=True):
    """What a step costs. `server_cpu`: core-seconds of all servers together. `worker_s`: seconds of one worker on
    `worker_cpu` cores. `memory`: MiB of all servers together, beside `base_memory` of each process.
    """

    server_cpu: float = 0.05
    worker_s: float = 0.5
    worker_cpu: float = 0.8
    memory: int = 2000
    base_memory: int = 400


class ScaledPSJob(PlannedJob):
    """Steps per second follow from the `model` and from the cores of the tasks."""

    def __init__(
        self,
        limits: ResourceLimits,
        *,
        model: Model | None = None,
        seed: int = 0,
        faults: Faults | None = None,
        mode: ScalingMode = ScalingMode.SINGLE_JOB,
        pace: ScalingPace | None = None,
    ) -> None:
        self.model = model or Model()
        self.started: dict[int, str] = {}
        """Name by id of every task that was ever started."""
        self.sizes: dict[int, NodeResource] = {}
        """With what each was started."""
        self._connecting = 0
        pace = pace or ScalingPace(start_s=120.0)
        super().__init__(StartScaling(JOB, "launcher", mode, limits, pace=pace, ps=True), seed, faults or Faults())

    @property
    def clusters(self) -> PSClusters:
        found = self.state.jobs[JOB].ps
        assert found is not None
        return found

    def running(self, kind: NodeType) -> list[TaskRecord]:
        """The tasks that run, and are in the cluster that is used."""
        version = self.clusters.acknowledged
        numbers = () if version is None else (*version.ps, *version.workers)
        found = (task for number in numbers if (task := find(self.clusters, number)) is not None)
        return [task for task in found if task.type is kind and task.status is NodeStatus.RUNNING]

    @property
    def speed(self) -> float:
        """Steps per second now."""
        servers, workers = self.running(NodeType.PS), self.running(NodeType.WORKER)
        if self.clusters.pending or not servers or not workers or live_chief(self.clusters) is None:
            return 0.0
        slowest = min(one.resource.cpu for one in servers)
        return min(len(workers) / self.model.worker_s, slowest * len(servers) / self.model.server_cpu)

    def kill(self, number: int, *, out_of_memory: bool = False) -> None:
        """The process of a task ends, and its launcher reaps it."""
        self.apply(Fenced(JOB, "launcher", number, -9, out_of_memory))

    # ---- of PlannedJob ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        for task in list(self.clusters.tasks):
            if task.status is NodeStatus.INITIAL and task.id not in self.started:
                self.started[task.id], self.sizes[task.id] = task.name, task.resource
                if self.random.random() >= self.faults.hangs or task.type is NodeType.CHIEF:
                    self.after(self.random.uniform(*self.faults.start_s), lambda task=task: self._start(task))
            elif task.status in (NodeStatus.FAILED, NodeStatus.RELEASED):
                self.after(0.0, lambda number=task.id: self.apply(Fenced(JOB, "launcher", number)))
        announced = self.clusters.announced
        if announced is not None and not self.clusters.void and self._connecting != announced.number:
            self._connecting = announced.number
            self.after(CONNECT_S, lambda number=announced.number: self._connect(number))

    def _start(self, task: TaskRecord) -> None:
        if (found := find(self.clusters, task.id)) is None or found.status is not NodeStatus.INITIAL:
            return
        address = "" if task.type is NodeType.CHIEF else f"host:{task.id}"
        self.apply(RegisterTask(JOB, f"t{task.id}", task.type, task.index, address, task.id))

    def _connect(self, version: int) -> None:
        chief = live_chief(self.clusters)
        if chief is None:
            self._connecting = 0
            return
        with contextlib.suppress(Stale):
            self.apply(Connected(JOB, chief.incarnation, version))

    def _fail_one(self) -> None:
        tasks = [task for task in self.clusters.tasks if task.status is NodeStatus.RUNNING]
        tasks = [task for task in tasks if task.type is not NodeType.CHIEF]
        if tasks:
            self.kill(self.random.choice(tasks).id)
        self.after(self.random.expovariate(1 / self.faults.fails_every_s), self._fail_one)

    def _beat(self) -> None:
        speed, chief = self.speed, live_chief(self.clusters)
        noise = 1 + self.faults.noise * self.random.gauss(0, 1)
        self.steps += BEAT_S * speed * max(0.0, noise)
        if chief is not None:
            heartbeats.beat(self.nodes, (JOB, chief.incarnation), self.now, step=int(self.steps))
        servers, workers, model = self.running(NodeType.PS), self.running(NodeType.WORKER), self.model
        killed: list[int] = []
        trees: list[WorkerProcesses] = []
        for task in (*servers, *workers):
            server = task.type is NodeType.PS
            cpu = (
                speed * model.server_cpu / len(servers)
                if server
                else speed / len(workers) * model.worker_s * model.worker_cpu
            )
            memory = model.base_memory + (model.memory // len(servers) if server else 0)
            trees.append(WorkerProcesses(task.incarnation, 1, 100 * cpu, memory * MIB))
            if 0 < task.resource.memory < memory:
                killed.append(task.id)
        usage = CPUVitals(8, 1.0, (1.0, 1.0, 1.0)), MemoryVitals(1 << 34, 1 << 33), NetworkVitals(0.0, 0.0)
        report = NodeVitals(JOB, "launcher", "here", *usage, workers=tuple(trees))
        node_vitals.keep(self.nodes, report, self.now)
        for number in killed[:1]:
            self.kill(number, out_of_memory=True)
        self.after(BEAT_S, self._beat)
