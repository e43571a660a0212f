"""The journaled state of a parameter server job, and the changes of single tasks. Decisions are in `decisions`."""

from __future__ import annotations

import bisect
import math

import msgspec

from dlrover_hooks.master.core.ps_clusters.task_states import ALIVE, TRANSITIONS, TaskEvent, TaskRecord, shown
from dlrover_hooks.protocol import Node, NodeResource, NodeStatus, NodeType, PSCluster, Tasks

Place = tuple[NodeType, int]


class Version(msgspec.Struct):
    """One cluster version: ids of its tasks by position, and the addresses. `ids` change only if a worker comes back
    under its old address."""

    number: int
    ps: tuple[int, ...]
    workers: tuple[int, ...]
    addresses: PSCluster


class Goal(msgspec.Struct):
    """A request that waits for the end of a switch. None: that number is as it is."""

    ps: int | None = None
    workers: int | None = None
    moves: tuple[Place, ...] = ()
    within_s: float = 0.0
    resources: dict[str, NodeResource] = {}
    """Of the new tasks of `moves`, by name, where it changes."""


class Growth(msgspec.Struct):
    """A planned change that is not announced yet. `places`: where new tasks must run by `due`; `new`: their ids."""

    ps: int
    workers: int
    places: tuple[Place, ...]
    due: float
    within_s: float
    new: list[int] = []
    resources: dict[str, NodeResource] = {}
    """Of new tasks by name, where they are others than those of the tasks that they replace."""


class PSClusters(msgspec.Struct):
    """All of it. Times are seconds by the clock of `now`."""

    ps: int = 0
    workers: int = 0
    """The size of the last announced version, and of the next one unless there is a `growth`."""
    tasks: list[TaskRecord] = []
    """By id."""
    incarnations: dict[str, int] = {}
    """Task id by incarnation, of registered processes that are not known to be dead."""
    last_id: int = 0
    number: int = 0
    """Of the list of tasks: increases with every change that is shown."""
    version: int = 0
    announced: Version | None = None
    acknowledged: Version | None = None
    connected: int = 0
    """The version that the live chief has acknowledged; 0: none, or there is no live chief."""
    void: bool = False
    """The announced version must not be given to the chief: another one follows."""
    lost_ps: bool = False
    """A server of the acknowledged or of a later announced version is gone: the next version is a crash version."""
    why: str = ""
    """The cause of the next version."""
    growth: Growth | None = None
    queued: Goal | None = None
    before: tuple[int, int] | None = None
    """`ps` and `workers` of the acknowledged version, while the announced one has others."""
    first_due: float = math.inf
    """From then on the first version may lack workers."""
    within_s: float = 120.0
    """For replacements."""
    finished: bool = False
    problem: str = ""
    resources: dict[str, NodeResource] = {}
    """Of new tasks: by the name of a task that was there before, else by type."""
    planned: bool = False
    """The master plans the tasks: one that was killed for memory is replaced once there is a plan for it."""
    out_of_memory: tuple[Node, ...] = ()
    """Tasks of a planned job that were killed for memory since the last plan, by their names."""

    @property
    def pending(self) -> bool:
        """The live chief, or the next one, has not acknowledged the announced version."""
        return self.announced is not None and self.connected != self.announced.number

    def due(self, now: float) -> float:
        """When the next INITIAL task must be registered, or the first version need not wait; infinity: never."""
        initial = (task.due for task in self.tasks if task.status is NodeStatus.INITIAL)
        first = self.first_due if self.announced is None and self.first_due > now else math.inf
        return min((first, *initial))


def add(clusters: PSClusters, place: Place, due: float = math.inf, resource: NodeResource | None = None) -> TaskRecord:
    """A new INITIAL task. `resource`: of it alone; None: that of its place, or of its type."""
    clusters.last_id += 1
    clusters.number += 1
    task = TaskRecord(id=clusters.last_id, type=place[0], index=place[1], due=due)
    known = clusters.resources.get(task.name) or clusters.resources.get(task.type.value)
    task.resource = resource or known or NodeResource()
    clusters.tasks.append(task)
    return task


def register(clusters: PSClusters, task: TaskRecord, incarnation: str, address: str, *, launched: bool) -> None:
    """The process of an INITIAL task is up."""
    task.incarnation, task.address, task.launched = incarnation, address, launched
    clusters.incarnations[incarnation] = task.id
    change(clusters, task, TaskEvent.REGISTERED)


def change(clusters: PSClusters, task: TaskRecord, event: TaskEvent, reason: str = "") -> None:
    """Move `task` along `TRANSITIONS`, and note what its end means for the versions it is in."""
    after = TRANSITIONS[task.status, event]
    if after not in ALIVE and task.status in ALIVE and event is not TaskEvent.RELEASED:
        _died(clusters, task, reason)
    clusters.number += 1
    task.reason = reason or task.reason
    if after is None or after is NodeStatus.FAILED:
        clusters.incarnations.pop(task.incarnation, None)
    if after is None:
        clusters.tasks.remove(task)
    else:
        task.status = after


def _died(clusters: PSClusters, task: TaskRecord, reason: str) -> None:
    announced, acknowledged = clusters.announced, clusters.acknowledged
    if task.type is NodeType.CHIEF:
        clusters.connected = 0
        listed = announced.workers if announced is not None else ()
        if not all(alive(clusters, worker) for worker in listed):  # a new strategy must not name a dead worker
            _void(clusters, "a listed worker is gone")
    elif task.type is NodeType.PS:
        if any(version is not None and task.id in version.ps for version in (announced, acknowledged)):
            clusters.lost_ps = True
            _void(clusters, f"{task.name} is gone: {reason}" if reason else f"{task.name} is gone")
    elif announced is not None and task.id in announced.workers and clusters.pending:
        _void(clusters, f"{task.name} is gone: {reason}" if reason else f"{task.name} is gone")


def _void(clusters: PSClusters, why: str) -> None:
    clusters.void, clusters.why = True, why


def alive(clusters: PSClusters, task: int) -> bool:
    """Task `task` is registered and its lease has not expired."""
    found = find(clusters, task)
    return found is not None and found.status in ALIVE


def find(clusters: PSClusters, task: int) -> TaskRecord | None:
    """Task `task`, if it is listed."""
    at = bisect.bisect_left(clusters.tasks, task, key=_id)
    return clusters.tasks[at] if at < len(clusters.tasks) and clusters.tasks[at].id == task else None


def of_process(clusters: PSClusters, incarnation: str) -> TaskRecord | None:
    """The task of this process, if it is registered and not known to be dead."""
    task = clusters.incarnations.get(incarnation)
    return find(clusters, task) if task is not None else None


def _id(task: TaskRecord) -> int:
    return task.id


def live_chief(clusters: PSClusters) -> TaskRecord | None:
    """The registered chief, if there is one."""
    chiefs = (task for task in clusters.tasks if task.type is NodeType.CHIEF)
    return next((task for task in chiefs if task.status is NodeStatus.RUNNING), None)


def view(clusters: PSClusters) -> Tasks:
    """The answer to `ShowTasks`."""
    goal = clusters.queued or Goal()
    growth = clusters.growth
    ps, workers = (growth.ps, growth.workers) if growth is not None else (clusters.ps, clusters.workers)
    return Tasks(
        number=clusters.number,
        tasks=tuple(shown(task) for task in clusters.tasks),
        version=clusters.version,
        acknowledged=clusters.acknowledged.number if clusters.acknowledged is not None else 0,
        ps=ps if goal.ps is None else goal.ps,
        workers=workers if goal.workers is None else goal.workers,
        finished=clusters.finished,
        problem=clusters.problem,
    )
