"""Requests about the tasks of a parameter server job: checks, then the change, then what follows from it.

Launchers and the command line are no part of the job and may send `ScaleTasks`, `MigrateTask` and `Fenced` under any
incarnation. Sent twice they have the effect of one.
"""

from __future__ import annotations

from dlrover_hooks.errors import BadRequest, Conflict, Stale
from dlrover_hooks.master.core.effects import PlanDue, Wake, cluster_topic, round_topic, tasks_topic, watch_topic
from dlrover_hooks.master.core.job import Effects, Job, arm
from dlrover_hooks.master.core.ps_clusters import cluster_state, decisions
from dlrover_hooks.master.core.ps_clusters.cluster_state import (
    Goal,
    PSClusters,
    change,
    find,
    live_chief,
    of_process,
    register,
    view,
)
from dlrover_hooks.master.core.ps_clusters.task_states import ALIVE, TaskEvent, TaskRecord, shown
from dlrover_hooks.protocol import (
    AwaitCluster,
    AwaitTasks,
    Connected,
    Done,
    EndTasks,
    Fenced,
    MigrateTask,
    Node,
    NodeStatus,
    NodeType,
    PSCluster,
    RegisterTask,
    ReportTask,
    ScaleTasks,
    Task,
    Tasks,
)

MOST_TASKS = 4096
"""Parameter servers and workers of one job."""
SHORTEST_READY_S = 0.1
_STOP = "End this process: the launcher starts another one if it is needed."


def scale(job: Job, event: ScaleTasks, now: float, effects: Effects) -> Tasks:
    """Set how many tasks the job shall have. Raises BadRequest, Stale."""
    clusters = job.ps or PSClusters()
    if clusters.finished:
        if not event.only_first:
            raise _is_finished(job)
        return view(clusters)
    if event.only_first and job.ps is not None:
        _end_planning(job, clusters)
        return view(clusters)
    if clusters.planned:
        raise BadRequest(
            f"The tasks of job {job.name!r} are planned by this master.",
            hint="Send ScaleNodes, or use dlrover-hooks scale.",
        )
    now_has = view(clusters)
    ps = now_has.ps if event.ps is None else event.ps
    workers = now_has.workers if event.workers is None else event.workers
    if ps < 1 or workers < 1:
        raise BadRequest(
            f"Job {job.name!r} cannot run with {ps} parameter servers and {workers} workers.",
            hint="It needs at least one of each; delete the job to end it.",
        )
    if ps + workers > MOST_TASKS:
        raise BadRequest(
            f"{ps} parameter servers and {workers} workers are more than {MOST_TASKS} tasks.", hint="Ask for fewer."
        )
    _check_room(job, clusters, event.ready_within_s)
    job.ps = clusters
    clusters.within_s = event.ready_within_s
    for kind, resource in ((NodeType.PS, event.ps_resource), (NodeType.WORKER, event.worker_resource)):
        if resource is not None:
            decisions.set_resource(clusters, kind, resource)
    decisions.ask(clusters, Goal(ps=event.ps, workers=event.workers, within_s=event.ready_within_s), now)
    if (view(clusters).ps, view(clusters).workers) != (now_has.ps, now_has.workers):
        clusters.number += 1
    _follow(job, clusters, now, effects)
    return view(clusters)


def _end_planning(job: Job, clusters: PSClusters) -> None:
    """The job was launched again without `--mode`."""
    job.scaling, clusters.planned, clusters.out_of_memory = None, False, ()


def migrate(job: Job, event: MigrateTask, now: float, effects: Effects) -> Tasks:
    """Replace a running parameter server or worker by a new one. Raises BadRequest, Stale."""
    clusters = _clusters(job)
    if clusters.finished:
        raise _is_finished(job)
    if event.type is NodeType.CHIEF:
        raise BadRequest(
            "A chief cannot be migrated: there is only one.", hint="End it: the launcher starts another one."
        )
    place = (event.type, event.index)
    name = f"{event.type.value}:{event.index}"
    found = [task for task in clusters.tasks if task.place == place and task.status is NodeStatus.RUNNING]
    if not found or clusters.announced is None:
        raise BadRequest(f"{name} of job {job.name!r} does not run.", hint="See `GET /v1/jobs/JOB/tasks`.")
    if not found[-1].launched:
        raise BadRequest(
            f"{name} of job {job.name!r} was not started by a launcher, so nothing would start the new one.",
            hint="Scale the job up and down, or end that process and start another one.",
        )
    _check_room(job, clusters, event.ready_within_s)
    resources = {name: event.resource} if event.resource is not None else {}
    growth = clusters.growth
    if growth is None or place not in growth.places or growth.resources | resources != growth.resources:
        decisions.ask(clusters, Goal(moves=(place,), within_s=event.ready_within_s, resources=resources), now)
    _follow(job, clusters, now, effects)
    return view(clusters)


def register_task(job: Job, event: RegisterTask, now: float, effects: Effects) -> Task:
    """A process is up. Raises BadRequest, Conflict, Stale."""
    clusters = _clusters(job)
    _check_address(event)
    known = of_process(clusters, event.incarnation)
    if known is not None:
        return shown(_again(job, known, event))
    if clusters.finished:
        raise _is_finished(job)
    task = _launched(job, clusters, event) if event.task is not None else _in_place(job, clusters, event)
    register(clusters, task, event.incarnation, event.address, launched=event.task is not None)
    answer = shown(task)
    _follow(job, clusters, now, effects)
    return answer


def _again(job: Job, task: TaskRecord, event: RegisterTask) -> TaskRecord:
    """The task of a process that is registered already. Raises BadRequest if it says something else now."""
    same = task.place == (event.type, event.index) and task.address == event.address
    if not same or event.task not in (None, task.id):
        raise BadRequest(
            f"Incarnation {event.incarnation!r} is registered in job {job.name!r} as task {task.id}, {task.name} at "
            f"{task.address!r}.",
            hint="Give each process an incarnation of its own.",
        )
    return task


def _launched(job: Job, clusters: PSClusters, event: RegisterTask) -> TaskRecord:
    """The INITIAL task that a launcher has started. Raises BadRequest, Conflict, Stale."""
    task = find(clusters, event.task or 0)
    if task is None or task.status in (NodeStatus.FAILED, NodeStatus.RELEASED, NodeStatus.PRE_DROPPED):
        what = f"is {task.status.value}: {task.reason}" if task is not None else "is not listed"
        raise Stale(f"Task {event.task} of job {job.name!r} {what}.", hint=_STOP)
    if task.place != (event.type, event.index):
        raise BadRequest(
            f"Task {task.id} of job {job.name!r} is {task.name}, not {event.type.value}:{event.index}.",
            hint="Start the process with the type and index of its task.",
        )
    if task.status is NodeStatus.RUNNING:
        raise _taken(job, task)
    if task.type is NodeType.CHIEF and (chief := live_chief(clusters)) is not None:
        raise _taken(job, chief)
    return task


def _in_place(job: Job, clusters: PSClusters, event: RegisterTask) -> TaskRecord:
    """The task of a process that was started without a launcher: whatever held its place before is gone."""
    place = (event.type, event.index)
    if event.type is NodeType.CHIEF and (chief := live_chief(clusters)) is not None:
        raise _taken(job, chief)
    limit = {NodeType.CHIEF: 1, NodeType.PS: clusters.ps, NodeType.WORKER: clusters.workers}[event.type]
    growth = clusters.growth
    if event.index >= limit and (growth is None or place not in growth.places):
        raise Stale(
            f"Job {job.name!r} has {clusters.ps} parameter servers and {clusters.workers} workers: "
            f"{event.type.value}:{event.index} is none of them.",
            hint="Scale the job up first; indices count from 0.",
        )
    here = [task for task in clusters.tasks if task.place == place]
    vacant = [task for task in here if task.status is NodeStatus.INITIAL]
    for task in here:
        if task not in vacant:
            change(clusters, task, TaskEvent.GONE, f"{event.incarnation!r} was started in its place")
            job.replies.pop(task.incarnation, None)
    return vacant[-1] if vacant else cluster_state.add(clusters, place)


def _taken(job: Job, task: TaskRecord) -> Conflict:
    return Conflict(
        f"{task.name} of job {job.name!r} is process {task.incarnation!r}, which is alive.",
        hint="End that process first, or give this job another name.",
    )


def _check_address(event: RegisterTask) -> None:
    if event.type not in (NodeType.CHIEF, NodeType.PS, NodeType.WORKER):
        raise BadRequest(
            f"A task cannot be {event.type.value}.", hint="Register a chief, a parameter server or a worker."
        )
    host, _, port = event.address.rpartition(":")
    if event.type is NodeType.CHIEF:
        if event.index:
            raise BadRequest(f"chief:{event.index} cannot be: there is one chief, of index 0.")
    elif not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or len(event.address) > 300:
        raise BadRequest(
            f"{event.address!r} is no address of {event.type.value}:{event.index}.",
            hint="Register with HOST:PORT of the TensorFlow server, as the chief must connect to it.",
        )


def report(job: Job, event: ReportTask, now: float, effects: Effects) -> Done:
    """The chief cannot reach a task. Raises BadRequest, Stale."""
    clusters = _clusters(job)
    _check_chief(job, clusters, event.incarnation)
    versions = (clusters.announced, clusters.acknowledged)
    version = next((one for one in versions if one is not None and one.number == event.version), None)
    if version is None:
        return Done()
    listed = version.ps if event.type is NodeType.PS else version.workers if event.type is NodeType.WORKER else ()
    if event.index >= len(listed):
        raise BadRequest(
            f"Version {event.version} of job {job.name!r} has no {event.type.value}:{event.index}.",
            hint="Report a position in the lists of that version.",
        )
    task = find(clusters, listed[event.index])
    if task is not None and task.status in ALIVE:
        _lose(job, clusters, task, f"the chief cannot reach it: {event.reason}")
        _follow(job, clusters, now, effects)
    return Done()


def fenced(job: Job, event: Fenced, now: float, effects: Effects) -> Done:
    """A launcher has reaped the process of a task. Raises BadRequest."""
    clusters = _clusters(job)
    if event.task > clusters.last_id:
        raise BadRequest(f"Job {job.name!r} never had a task {event.task}.", hint="Give the id of the task.")
    task = find(clusters, event.task)
    if task is None:
        return Done()
    done = task.type is NodeType.CHIEF and event.exit_code == 0 and task.status is not NodeStatus.INITIAL
    memory = ": it was killed for want of memory" if event.out_of_memory else ""
    if memory and clusters.planned and task.type is not NodeType.CHIEF and not clusters.finished:
        killed = Node(task.type, task.id, task.resource, task.name)
        clusters.out_of_memory = (*clusters.out_of_memory, killed)
    _remove(job, clusters, task, f"it ended with exit code {event.exit_code}{memory}")
    if done:
        _finish(job, clusters, effects)
    _follow(job, clusters, now, effects)
    return Done()


def connected(job: Job, event: Connected, now: float, effects: Effects) -> Done:
    """The chief is connected to a version, or could not connect. Raises Stale."""
    clusters = _clusters(job)
    _check_chief(job, clusters, event.incarnation)
    announced = clusters.announced
    current = announced is not None and announced.number == event.version
    if announced is not None and current and event.failed:
        decisions.roll_back(clusters, f"version {event.version} was rolled back: {event.failed}")
    elif announced is not None and current and all(cluster_state.alive(clusters, task) for task in announced.ps):
        clusters.number += 1
        clusters.acknowledged, clusters.connected = announced, event.version
        clusters.void, clusters.lost_ps, clusters.before = False, False, None
    elif event.failed or clusters.acknowledged is None or clusters.acknowledged.number != event.version:
        raise Stale(
            f"Version {event.version} of job {job.name!r} is void; version {clusters.version} was announced last.",
            hint="Wait for the next version and connect to it.",
        )
    _follow(job, clusters, now, effects)
    return Done()


def end_tasks(job: Job, event: EndTasks, now: float, effects: Effects) -> Done:
    """The chief is done. Raises Stale."""
    clusters = _clusters(job)
    if not clusters.finished:
        _check_chief(job, clusters, event.incarnation)
        _finish(job, clusters, effects)
        _follow(job, clusters, now, effects)
    return Done()


def part(job: Job, incarnation: str, now: float, effects: Effects, *, lost: bool) -> None:
    """A process left on purpose (it serves no more requests), or `lost`: its lease expired. Others are ignored."""
    clusters = job.ps
    task = of_process(clusters, incarnation) if clusters is not None else None
    if clusters is None or task is None:
        return
    if not lost:
        _remove(job, clusters, task, "it left")
    elif task.status in ALIVE and not clusters.finished:
        _lose(job, clusters, task, "its lease expired")
    elif task.launched:  # RELEASED: its launcher reaps it
        del clusters.incarnations[incarnation]
    else:
        _remove(job, clusters, task, "its lease expired")
    _follow(job, clusters, now, effects)


def tick(job: Job, now: float, effects: Effects) -> None:
    """A deadline is reached."""
    if job.ps is not None:
        _follow(job, job.ps, now, effects)


# ---- queries ---------------------------------------------------------------------------------------------------------


def show(job: Job) -> Tasks:
    """All tasks. Raises BadRequest if it is no parameter server job."""
    return view(_clusters(job))


def awaited_tasks(job: Job, request: AwaitTasks) -> Tasks | None:
    """All tasks, once they have changed."""
    clusters = _clusters(job)
    return view(clusters) if clusters.number > request.after else None


def awaited_cluster(job: Job, request: AwaitCluster) -> PSCluster | None:
    """The announced version for the chief, once it is newer. A new chief gets none while an older one is not fenced.

    Raises Stale.
    """
    clusters = _clusters(job)
    _check_chief(job, clusters, request.incarnation)
    announced = clusters.announced
    if announced is None or clusters.void or announced.number <= request.after:
        return None
    two = any(one.type is NodeType.CHIEF and one.status is NodeStatus.FAILED for one in clusters.tasks)
    return None if two else announced.addresses


# ---- common ----------------------------------------------------------------------------------------------------------


def _clusters(job: Job) -> PSClusters:
    if job.ps is None:
        raise BadRequest(
            f"Job {job.name!r} has no parameter servers.", hint="Set how many it shall have first: ScaleTasks."
        )
    return job.ps


def _check_chief(job: Job, clusters: PSClusters, incarnation: str) -> None:
    chief = live_chief(clusters)
    if chief is None or chief.incarnation != incarnation:
        who = repr(chief.incarnation) if chief is not None else "not registered"
        raise Stale(f"{incarnation!r} is not the chief of job {job.name!r}: that is {who}.", hint=_STOP)


def _check_room(job: Job, clusters: PSClusters, ready_within_s: float) -> None:
    """New tasks may be asked for. Raises BadRequest."""
    if ready_within_s < SHORTEST_READY_S:
        raise BadRequest(
            f"No task registers within {ready_within_s:g} s.", hint=f"Give it {SHORTEST_READY_S:g} s at least."
        )
    if len(clusters.tasks) > 2 * MOST_TASKS:
        raise BadRequest(
            f"Job {job.name!r} has {len(clusters.tasks)} tasks, most of which ended and were never reaped.",
            hint="Start a launcher for it, or delete the job.",
        )


def _is_finished(job: Job) -> Stale:
    return Stale(f"Job {job.name!r} is finished.", hint="Delete it, or give the new job another name.")


def _lose(job: Job, clusters: PSClusters, task: TaskRecord, reason: str) -> None:
    job.replies.pop(task.incarnation, None)
    change(clusters, task, TaskEvent.LOST, reason)


def _remove(job: Job, clusters: PSClusters, task: TaskRecord, reason: str) -> None:
    job.replies.pop(task.incarnation, None)
    change(clusters, task, TaskEvent.GONE, reason)


def _finish(job: Job, clusters: PSClusters, effects: Effects) -> None:
    decisions.finish(clusters)
    if job.scaling is not None:
        job.scaling.finished = True
    job.finished, job.finished_step = True, job.finished_step or 0
    effects += [Wake(topic=topic(job.name)) for topic in (watch_topic, round_topic)]


def _follow(job: Job, clusters: PSClusters, now: float, effects: Effects) -> None:
    """Settle, then wake all requests that wait for tasks or versions: each looks whether it has an answer."""
    decisions.settle(clusters, now)
    if clusters.planned:
        effects.append(PlanDue(job=job.name))
    effects += [Wake(topic=topic(job.name)) for topic in (tasks_topic, cluster_topic)]
    arm(job, now, effects)
