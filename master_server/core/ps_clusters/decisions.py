"""What follows from the state of a parameter server job: new tasks, new versions, tasks that are released.

`settle` is called after every event. It looks at the state alone, so the order in which faults come does not matter.
A parameter server holds a part of the model, so every index must run; of the workers one is enough. A version with a
server missing is announced only when the old server is gone for certain: a stopped one would hold up the workers that
wait for its reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlrover_hooks.master.core.ps_clusters.cluster_state import (
    Goal,
    Growth,
    Place,
    PSClusters,
    Version,
    add,
    alive,
    change,
    find,
)
from dlrover_hooks.master.core.ps_clusters.task_states import EXPECTED, TaskEvent, TaskRecord, name_of
from dlrover_hooks.protocol import NodeResource, NodeStatus, NodeType, PSCluster

Lists = tuple[list[TaskRecord], list[TaskRecord]]
"""Parameter servers and workers, by index."""


def settle(clusters: PSClusters, now: float) -> None:
    """Do what is due at `now`. Of a finished job nothing is."""
    if clusters.finished:
        return
    _expire(clusters, now)
    _begin(clusters, now)
    _replace(clusters, now)
    _rejoin(clusters)
    _announce(clusters, now)
    _release_left_out(clusters)


def ask(clusters: PSClusters, goal: Goal, now: float) -> None:
    """Keep a request until the switch under way has ended. Before the first version it is carried out at once."""
    if clusters.announced is not None:
        old = clusters.queued or Goal()
        clusters.queued = Goal(
            ps=old.ps if goal.ps is None else goal.ps,
            workers=old.workers if goal.workers is None else goal.workers,
            moves=tuple(dict.fromkeys((*old.moves, *goal.moves))),
            within_s=goal.within_s,
            resources=old.resources | goal.resources,
        )
        return
    ps = clusters.ps if goal.ps is None else goal.ps
    workers = clusters.workers if goal.workers is None else goal.workers
    if (ps, workers) != (clusters.ps, clusters.workers):
        clusters.number += 1
        clusters.ps, clusters.workers, clusters.first_due = ps, workers, now + goal.within_s
        _release_surplus(clusters, "the job was scaled down")


def set_resource(clusters: PSClusters, kind: NodeType, resource: NodeResource) -> None:
    """Of tasks that are added from now on. Those that are there keep theirs, and so do their replacements."""
    others = {name: one for name, one in clusters.resources.items() if name.partition(":")[0] != kind.value}
    clusters.resources = others | {kind.value: resource}
    for task in clusters.tasks:
        if task.type is kind and task.status is not NodeStatus.RELEASED:
            _remember(clusters, task)


def roll_back(clusters: PSClusters, problem: str) -> None:
    """The chief could not connect to the announced version: return to the acknowledged one if its servers all live.

    Otherwise the same tasks are announced again.
    """
    announced, acknowledged = clusters.announced, clusters.acknowledged
    assert announced is not None
    clusters.number += 1
    clusters.problem = clusters.why = problem
    clusters.void, clusters.connected = True, 0
    if acknowledged is None or not all(alive(clusters, task) for task in acknowledged.ps):
        return
    kept = {*acknowledged.ps, *acknowledged.workers}
    for task in _found(clusters, (*announced.ps, *announced.workers)):
        if task.id not in kept and task.status is NodeStatus.RUNNING:
            change(clusters, task, TaskEvent.RELEASED, problem)
    for task in _found(clusters, kept):
        _remember(clusters, task)
        if task.status is NodeStatus.PRE_DROPPED:
            change(clusters, task, TaskEvent.KEPT)
    if clusters.before is not None:
        (clusters.ps, clusters.workers), clusters.before = clusters.before, None
        _release_surplus(clusters, problem)


def finish(clusters: PSClusters) -> None:
    """The chief is done: release all other tasks."""
    clusters.finished, clusters.growth, clusters.queued = True, None, None
    clusters.number += 1
    for task in list(clusters.tasks):
        ends_itself = task.type is NodeType.CHIEF and task.status is NodeStatus.RUNNING
        if task.status not in (NodeStatus.FAILED, NodeStatus.RELEASED) and not ends_itself:
            change(clusters, task, TaskEvent.RELEASED, "the job is finished")


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _expire(clusters: PSClusters, now: float) -> None:
    """Give up INITIAL tasks that are due. A planned change is given up with all its new tasks."""
    growth = clusters.growth
    late = [task for task in clusters.tasks if task.status is NodeStatus.INITIAL and task.due <= now]
    planned = [task for task in late if growth is not None and task.id in growth.new]
    if growth is not None and planned:
        names = ", ".join(task.name for task in planned[:8])
        clusters.problem = (
            f"{names} did not register within {growth.within_s:g} s: the job goes on with {clusters.ps} parameter "
            f"servers and {clusters.workers} workers."
        )
        clusters.growth = None
        for task in _found(clusters, growth.new):
            if task.status in EXPECTED:
                change(clusters, task, TaskEvent.RELEASED, clusters.problem)
    released = {task.place for task in clusters.tasks if task.status is NodeStatus.RELEASED}
    for task in late:
        if task.status is not NodeStatus.INITIAL:
            continue
        if task.place in released:  # its predecessor was not even reaped: no launcher is there to start another one
            task.due = now + clusters.within_s
            continue
        clusters.problem = f"{task.name} did not register within {clusters.within_s:g} s: another one is to be started."
        change(clusters, task, TaskEvent.RELEASED, clusters.problem)


def _begin(clusters: PSClusters, now: float) -> None:
    """Carry out the queued request, unless a switch is under way."""
    goal = clusters.queued
    if goal is None or clusters.growth is not None or clusters.pending or clusters.void:
        return
    clusters.queued = None
    ps = clusters.ps if goal.ps is None else goal.ps
    workers = clusters.workers if goal.workers is None else goal.workers
    places = [(NodeType.PS, index) for index in range(clusters.ps, ps)]
    places += [(NodeType.WORKER, index) for index in range(clusters.workers, workers)]
    sizes = {NodeType.PS: min(ps, clusters.ps), NodeType.WORKER: min(workers, clusters.workers)}
    running = {task.place for task in clusters.tasks if task.status is NodeStatus.RUNNING}
    places += [place for place in goal.moves if place in running and place[1] < sizes[place[0]]]
    if places or (ps, workers) != (clusters.ps, clusters.workers):
        clusters.number += 1
        clusters.problem = ""
        clusters.growth = Growth(
            ps=ps,
            workers=workers,
            places=tuple(places),
            due=now + goal.within_s,
            within_s=goal.within_s,
            resources=goal.resources,
        )


def _replace(clusters: PSClusters, now: float) -> None:
    """Have one task INITIAL or RUNNING in each place; in the places of a planned change, a new one too.

    A task that was killed for memory is not replaced before the plan for it: its successor would be killed likewise.
    """
    expected = {task.place for task in clusters.tasks if task.status in EXPECTED}
    killed = {task.name for task in clusters.out_of_memory}
    if (NodeType.CHIEF, 0) not in expected:
        add(clusters, (NodeType.CHIEF, 0))
    for place in _places(clusters.ps, clusters.workers):
        if place not in expected and name_of(place) not in killed:
            add(clusters, place, now + clusters.within_s)
    growth = clusters.growth
    if growth is None:
        return
    new = {task.place for task in _found(clusters, growth.new) if task.status in EXPECTED}
    due = growth.due if growth.due > now else now + growth.within_s  # one that had registered in time was lost since
    for place in growth.places:
        if place not in new:
            growth.new.append(add(clusters, place, due, growth.resources.get(name_of(place))).id)


def _rejoin(clusters: PSClusters) -> None:
    """A worker that was started again under its old address takes its old position: TensorFlow connects to it again."""
    announced = clusters.announced
    if announced is None or all(alive(clusters, task) for task in announced.workers):
        return
    listed = {*announced.workers}
    back = {
        task.address: task.id
        for task in clusters.tasks
        if task.type is NodeType.WORKER and task.status is NodeStatus.RUNNING and task.id not in listed
    }
    taken = zip(announced.workers, announced.addresses.workers, strict=True)
    workers = tuple(task if alive(clusters, task) else back.pop(address, task) for task, address in taken)
    if clusters.acknowledged is not None and clusters.acknowledged.number == announced.number:
        clusters.acknowledged.workers = workers
    announced.workers = workers


def _release_left_out(clusters: PSClusters) -> None:
    """Release what the version that the chief is connected to does not need."""
    if clusters.pending:
        return
    for task in list(clusters.tasks):
        if task.status is NodeStatus.PRE_DROPPED:
            change(clusters, task, TaskEvent.RELEASED, f"left out of version {clusters.version}")


def _release_surplus(clusters: PSClusters, reason: str) -> None:
    """Release tasks whose index is too high for the cluster, of those that no version to come has."""
    needed = set(_places(clusters.ps, clusters.workers))
    for task in list(clusters.tasks):
        if task.status in EXPECTED and task.type is not NodeType.CHIEF and task.place not in needed:
            change(clusters, task, TaskEvent.RELEASED, reason)


# ---- versions --------------------------------------------------------------------------------------------------------


def _announce(clusters: PSClusters, now: float) -> None:
    """Announce the next version if there is a reason and its tasks run."""
    grown = _grown(clusters)
    if clusters.announced is None:
        lists, why = _lists(clusters, grown=False), "the first version"
        if lists is None or (len(lists[1]) < clusters.workers and now < clusters.first_due):
            return
    elif clusters.void:
        lists, why = _lists(clusters, grown=grown), clusters.why
        if lists is None or _unfenced(clusters):
            return
    elif clusters.pending:
        return
    elif grown:
        lists, why = _lists(clusters, grown=True), _described(clusters)
        if lists is None:
            return
    else:
        lists = _lists(clusters, grown=False)
        listed = clusters.announced.workers
        if lists is None or all(task.id in listed for task in lists[1]):
            return
        why = "a worker was replaced"
    if grown and clusters.announced is not None and clusters.growth is not None:
        clusters.before = clusters.before or (clusters.ps, clusters.workers)
        clusters.ps, clusters.workers, clusters.growth = clusters.growth.ps, clusters.growth.workers, None
    _issue(clusters, lists, why)


def _issue(clusters: PSClusters, lists: Lists, why: str) -> None:
    """Announce `lists`. Tasks left out wait for the acknowledgement."""
    clusters.version += 1
    clusters.number += 1
    servers, workers = lists
    clusters.announced = Version(
        number=clusters.version,
        ps=tuple(task.id for task in servers),
        workers=tuple(task.id for task in workers),
        addresses=PSCluster(
            version=clusters.version,
            ps=tuple(task.address for task in servers),
            workers=tuple(task.address for task in workers),
            crash=clusters.lost_ps,
            why=why,
        ),
    )
    clusters.void, clusters.why = False, ""
    for task in (*servers, *workers):
        _remember(clusters, task)
    listed = {*clusters.announced.ps, *clusters.announced.workers}
    if (growth := clusters.growth) is not None:  # one of its tasks may have replaced a dead one already
        taken = {task.place for task in (*servers, *workers) if task.id in growth.new}
        growth.places = tuple(place for place in growth.places if place not in taken)
        growth.new = [task for task in growth.new if task not in listed]
        listed.update(growth.new)
    needed = set(_places(clusters.ps, clusters.workers))
    for task in list(clusters.tasks):
        if task.type is NodeType.CHIEF or task.id in listed:
            continue
        if task.status is NodeStatus.RUNNING:
            change(clusters, task, TaskEvent.DROPPED, f"not in version {clusters.version}")
        elif task.status is NodeStatus.INITIAL and task.place not in needed:
            change(clusters, task, TaskEvent.RELEASED, f"not in version {clusters.version}")


def _remember(clusters: PSClusters, task: TaskRecord) -> None:
    """A task that replaces it gets the same."""
    if task.resource != clusters.resources.get(task.type.value, NodeResource()):
        clusters.resources[task.name] = task.resource
    else:
        clusters.resources.pop(task.name, None)


def _grown(clusters: PSClusters) -> bool:
    """All new tasks of the planned change run."""
    growth = clusters.growth
    if growth is None:
        return False
    running = {task.place for task in _found(clusters, growth.new) if task.status is NodeStatus.RUNNING}
    return running.issuperset(growth.places)


def _described(clusters: PSClusters) -> str:
    growth = clusters.growth
    assert growth is not None
    if (growth.ps, growth.workers) == (clusters.ps, clusters.workers):
        return "migrated: " + ", ".join(f"{kind.value}:{index}" for kind, index in growth.places[:8])
    return f"from {clusters.ps} to {growth.ps} parameter servers, from {clusters.workers} to {growth.workers} workers"


def _lists(clusters: PSClusters, *, grown: bool) -> Lists | None:
    """The running tasks of the next version, or None if a server or every worker is missing.

    `grown`: with the planned change. Without it, a new task of the change is taken only if no other runs in its place.
    """
    growth = clusters.growth
    ps, workers = (growth.ps, growth.workers) if grown and growth is not None else (clusters.ps, clusters.workers)
    new = frozenset(growth.new) if growth is not None and not grown else frozenset[int]()
    best: dict[Place, TaskRecord] = {}
    for task in clusters.tasks:
        if task.status is NodeStatus.RUNNING:
            old = best.get(task.place)
            if old is None or (task.id not in new, task.id) > (old.id not in new, old.id):
                best[task.place] = task
    servers = [best[NodeType.PS, index] for index in range(ps) if (NodeType.PS, index) in best]
    listed = [best[NodeType.WORKER, index] for index in range(workers) if (NodeType.WORKER, index) in best]
    return (servers, listed) if ps and len(servers) == ps and listed else None


def _unfenced(clusters: PSClusters) -> bool:
    """A server that the chief or its workers may still be connected to is dead, but its process may exist."""
    versions = (version for version in (clusters.announced, clusters.acknowledged) if version is not None)
    servers = (task for version in versions for task in _found(clusters, version.ps))
    return any(task.status is NodeStatus.FAILED for task in servers)


def _found(clusters: PSClusters, ids: Iterable[int]) -> list[TaskRecord]:
    return [task for one in ids if (task := find(clusters, one)) is not None]


def _places(ps: int, workers: int) -> Iterator[Place]:
    yield from ((NodeType.PS, index) for index in range(ps))
    yield from ((NodeType.WORKER, index) for index in range(workers))
