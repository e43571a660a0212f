"""Requests about a job whose nodes are planned, and the master's own events: a window was measured, a plan was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.effects import PlanDue, Wake, nodes_topic
from dlrover_hooks.master.core.events import PlanMade, Sampled
from dlrover_hooks.master.core.job import Effects, Job, arm
from dlrover_hooks.master.core.job_scaling import job_statistics, plan_verification
from dlrover_hooks.master.core.job_scaling.job_statistics import JobStatistics
from dlrover_hooks.master.core.job_scaling.plan_verification import PlanHistory
from dlrover_hooks.master.core.job_scaling.ps_manager import PSManager
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling, desired
from dlrover_hooks.master.core.job_scaling.worker_manager import WorkerManager
from dlrover_hooks.master.core.ps_clusters import task_requests
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters
from dlrover_hooks.protocol import (
    AwaitNodes,
    DesiredNodes,
    Done,
    NodeGroupResource,
    NodeResource,
    NodeType,
    OptimizeStage,
    Plans,
    PlanView,
    ReportNodes,
    ResourceLimits,
    ResourcePlan,
    ScaleNodes,
    StartScaling,
)


def start(job: Job, event: StartScaling, now: float, effects: Effects) -> DesiredNodes:
    """Plan the nodes of this job from now on. Raises BadRequest."""
    if event.ps != (job.ps is not None) and (job.ps is not None or job.scaling is not None):
        has = "has parameter servers" if job.ps is not None else "has no parameter servers"
        raise BadRequest(f"Job {job.name!r} {has}.", hint="Give the new job another name (--job).")
    scaling = job.scaling or JobScaling(event.mode, event.limits)
    scaling.mode, scaling.limits = event.mode, event.limits
    scaling.relaunches, scaling.relaunch_window_s = event.relaunches, event.relaunch_window_s
    scaling.user, scaling.script_hash, scaling.sizes = event.user, event.script_hash, event.sizes
    scaling.history = plan_verification.at_pace(scaling.history, event.pace)
    job.scaling = scaling
    if event.ps:
        job.ps = job.ps or PSClusters()
        PSManager(job.ps, scaling, now).start()
    else:
        if not event.keep_nodes:
            WorkerManager(scaling, now).forget_processes()
        scaling.workers = min(scaling.workers, event.limits.max_workers)
        if scaling.workers:
            scaling.workers = max(scaling.workers, event.limits.min_workers)
    return _follow(job, scaling, now, effects)


def sampled(job: Job, event: Sampled, now: float, effects: Effects) -> Done:
    """A window was measured: a plan may have to be taken back. Raises Stale, UsageError."""
    scaling = _scaling(job)
    scaling.statistics = job_statistics.observed(scaling.statistics, event.sample, ps=job.ps is not None)
    scaling.history, rollback = plan_verification.observed(scaling.history, event.sample, now)
    if not rollback.empty:
        _carry_out(job, scaling, rollback, now)
    _follow(job, scaling, now, effects)
    return Done()


def made(job: Job, event: PlanMade, now: float, effects: Effects) -> Done:
    """The optimizer has made a plan. It may be empty, if only the stage changes. Raises Stale, UsageError."""
    scaling, plan = _scaling(job), event.plan
    first = scaling.stage is OptimizeStage.CREATE
    if scaling.finished or (scaling.held and not first and not event.answers_out_of_memory):
        why = "it is over" if scaling.finished else "a user's plan holds"
        raise Stale(f"The plan of job {job.name!r} comes too late: {why}.")
    _check(job, plan)
    plan = _within(plan, scaling.limits)  # they may have changed since it was asked for
    if not event.answers_out_of_memory:
        plan = _with_given_sizes(plan, scaling.sizes, {} if first else has(job, scaling, now).node_group_resources)
    if scaling.held and first:
        plan = _lacking(plan, has(job, scaling, now))
    if plan.empty:
        pass
    elif event.verified:
        sample = scaling.statistics.recent[-1] if scaling.statistics.recent else None
        why = plan_verification.refusal(scaling.history, plan, sample, now) if sample else "nothing was measured"
        if sample is None or why:
            raise Stale(f"The plan of job {job.name!r} comes too late: {why}.")
        scaling.history = plan_verification.made(
            scaling.history, plan, sample, now, reason=event.reason, predicted=event.predicted
        )
    else:
        before = has(job, scaling, now)
        scaling.history = plan_verification.carried_out(scaling.history, plan, now, event.reason, before)
    scaling.stage = event.stage
    if not plan.empty:
        _carry_out(job, scaling, plan, now)
    if event.answers_out_of_memory:
        scaling.out_of_memory = ()
        if job.ps is not None:
            job.ps.out_of_memory = ()
    _follow(job, scaling, now, effects)
    return Done()


def scale(job: Job, event: ScaleNodes, now: float, effects: Effects) -> DesiredNodes:
    """A user's plan, or its release. Raises BadRequest, Stale."""
    scaling = _scaling(job)
    if scaling.finished:
        raise Stale(f"Job {job.name!r} is over.", hint="Start it again.")
    plan = event.plan
    if not plan.empty:
        _check(job, plan)
        _check_limits(job, plan, scaling.limits)
        before = has(job, scaling, now)
        if job.ps is None:
            plan = _with_sizes(plan, before, scaling.sizes)
        if plan.node_resources or not plan.node_group_resources.items() <= before.node_group_resources.items():
            scaling.history = plan_verification.carried_out(scaling.history, plan, now, "asked for by a user", before)
            _carry_out(job, scaling, plan, now)
    scaling.held = not event.release
    return _follow(job, scaling, now, effects)


def report(job: Job, event: ReportNodes, now: float, effects: Effects) -> Done:
    """Nodes run, or have ended. Raises Stale, BadRequest."""
    scaling = _of_nodes(job)
    manager = WorkerManager(scaling, now)
    for change in event.changes:
        manager.change(change)
    _follow(job, scaling, now, effects)
    return Done()


def replace(job: Job, node: str, reason: str, now: float, effects: Effects) -> None:
    """Another node takes the place of this one, because of `reason`. Nothing happens if the job does not have it."""
    scaling = _scaling(job)
    WorkerManager(scaling, now).replace(node, reason)
    _follow(job, scaling, now, effects)


def awaited(job: Job, request: AwaitNodes) -> DesiredNodes | None:
    """The answer to a long-poll; None: the list is the one that the sender has. Raises Stale, BadRequest."""
    scaling = _of_nodes(job)
    return desired(scaling) if scaling.number != request.after else None


def tick(job: Job, now: float, effects: Effects) -> None:
    """A deadline was reached: nodes may not have started in time."""
    scaling = job.scaling
    if scaling is None or scaling.due > now:
        return
    scaling.history, rollback = plan_verification.not_started(scaling.history, now)
    if not rollback.empty:
        _carry_out(job, scaling, rollback, now)
    _follow(job, scaling, now, effects)


def _carry_out(job: Job, scaling: JobScaling, plan: ResourcePlan, now: float) -> None:
    """Make the nodes those of `plan`.

    What the nodes of before used says nothing about these. With cores other than before, the speeds of all numbers of
    nodes are forgotten, too: they were those of other nodes.
    """
    before, plan = _processors(has(job, scaling, now)), _within(plan, scaling.limits)
    if job.ps is not None:
        PSManager(job.ps, scaling, now).carry_out(plan)
    elif (group := plan.node_group_resources.get(NodeType.WORKER.value)) is not None:
        WorkerManager(scaling, now).carry_out(group)
    same = _processors(has(job, scaling, now)) == before
    scaling.statistics = JobStatistics((), scaling.statistics.measured if same else ())


def _processors(plan: ResourcePlan) -> list[tuple[str, float, int]]:
    """Of one node of each type."""
    sizes = [(name, group.node_resource) for name, group in sorted(plan.node_group_resources.items())]
    return [(name, size.cpu, size.gpu_num) for name, size in sizes]


def show(job: Job, now: float) -> Plans:
    """The answer to `ShowPlans`. Raises Stale."""
    scaling = _scaling(job)
    speeds = scaling.history.speeds
    return Plans(
        job=job.name,
        mode=scaling.mode,
        ps=job.ps is not None,
        held=scaling.held,
        nodes=_desired(job, scaling, now).nodes,
        plans=tuple(_views(scaling.history, now)),
        waits=_waits(scaling, now),
        speed=speeds[-1] if speeds else None,
        problem=scaling.failure or scaling.problem or (job.ps.problem if job.ps is not None else ""),
    )


def _follow(job: Job, scaling: JobScaling, now: float, effects: Effects) -> DesiredNodes:
    """What follows from a change: missing nodes, a message to what starts them, a plan that is due."""
    if job.ps is not None:
        task_requests.tick(job, now, effects)
        return _desired(job, scaling, now)
    WorkerManager(scaling, now).settle()
    effects.append(PlanDue(job=job.name))
    if scaling.number != scaling.told:
        scaling.told = scaling.number
        effects.append(Wake(topic=nodes_topic(job.name)))
    arm(job, now, effects)
    return desired(scaling)


def _desired(job: Job, scaling: JobScaling, now: float) -> DesiredNodes:
    if job.ps is None:
        return desired(scaling)
    return DesiredNodes(job.ps.number, PSManager(job.ps, scaling, now).nodes(), job.ps.finished)


def _scaling(job: Job) -> JobScaling:
    if job.scaling is None:
        raise Stale(
            f"The nodes of job {job.name!r} are not planned by this master.",
            hint="Start it with dlrover-hooks run --mode single-job.",
        )
    return job.scaling


def _of_nodes(job: Job) -> JobScaling:
    """Of a job whose nodes are no tasks."""
    scaling = _scaling(job)
    if job.ps is not None:
        raise BadRequest(f"The nodes of job {job.name!r} are tasks.", hint="AwaitTasks lists them.")
    return scaling


def has(job: Job, scaling: JobScaling, now: float) -> ResourcePlan:
    """What the job has, as a plan; empty before its first plan."""
    if job.ps is not None:
        return ResourcePlan(PSManager(job.ps, scaling, now).groups())
    group = NodeGroupResource(scaling.workers, scaling.worker_resource)
    return ResourcePlan({NodeType.WORKER.value: group} if scaling.workers else {})


def _with_sizes(plan: ResourcePlan, before: ResourcePlan, given: Mapping[str, NodeResource]) -> ResourcePlan:
    """A group without a size keeps the one that it has, or that the user has given."""
    sizes = dict(given) | {name: group.node_resource for name, group in before.node_group_resources.items()}
    groups = {
        name: NodeGroupResource(group.count, sizes[name])
        if group.node_resource == NodeResource() and name in sizes
        else group
        for name, group in plan.node_group_resources.items()
    }
    return ResourcePlan(groups, plan.node_resources)


def _with_given_sizes(
    plan: ResourcePlan, given: Mapping[str, NodeResource], before: Mapping[str, NodeGroupResource]
) -> ResourcePlan:
    """Groups whose size the user has given keep it, or what they got `before`, after an end for memory."""
    groups = {
        name: NodeGroupResource(group.count, before[name].node_resource if name in before else given[name])
        if name in given
        else group
        for name, group in plan.node_group_resources.items()
    }
    return ResourcePlan(groups, plan.node_resources)


def _check(job: Job, plan: ResourcePlan) -> None:
    """Raises BadRequest if the job has no such nodes."""
    kinds, names = {NodeType.WORKER.value}, set[str]()
    what, hint = "has only workers, which all have one size", "Give the number of workers, or the size of all of them."
    if (clusters := job.ps) is not None:
        kinds.add(NodeType.PS.value)
        names = {task.name for task in (*clusters.tasks, *clusters.out_of_memory)}
        what, hint = (
            "has no such node",
            "Its types are ps and worker; a node is called by type and index, such as ps:0.",
        )
    if other := [*sorted(set(plan.node_group_resources) - kinds), *sorted(set(plan.node_resources) - names)]:
        raise BadRequest(f"A plan for {other[0]!r}: job {job.name!r} {what}.", hint=hint)


_BOUNDS = {
    NodeType.WORKER.value: ("workers", "--min-workers and --max-workers"),
    NodeType.PS.value: ("parameter servers", "--ps and --max-ps"),
}
"""In messages: what a group has, and the options that bound its number."""


def _check_limits(job: Job, plan: ResourcePlan, limits: ResourceLimits) -> None:
    """Raises BadRequest if a group has more or fewer nodes than it may have."""
    for name, group in plan.node_group_resources.items():
        (least, most), (what, options) = _least_and_most(name, limits), _BOUNDS[name]
        if not least <= group.count <= most:
            raise BadRequest(
                f"Job {job.name!r} may have {least} to {most} {what}, not {group.count}.",
                hint=f"Start it again with other {options}.",
            )


def _within(plan: ResourcePlan, limits: ResourceLimits) -> ResourcePlan:
    """The plan with numbers of nodes that the job may have."""
    groups = dict[str, NodeGroupResource]()
    for name, group in plan.node_group_resources.items():
        least, most = _least_and_most(name, limits)
        groups[name] = msgspec.structs.replace(group, count=min(max(group.count, least), most))
    return msgspec.structs.replace(plan, node_group_resources=groups)


def _lacking(plan: ResourcePlan, present: ResourcePlan) -> ResourcePlan:
    """The groups of the first plan that the job has no nodes of: the user's plan, which came before, left them out."""
    groups, now = plan.node_group_resources, present.node_group_resources
    return ResourcePlan({name: group for name, group in groups.items() if name not in now or not now[name].count})


def _least_and_most(name: str, limits: ResourceLimits) -> tuple[int, int]:
    """Of the nodes of one type."""
    if name == NodeType.PS.value:
        return limits.min_ps, limits.max_ps
    return limits.min_workers, limits.max_workers


def _views(history: PlanHistory, now: float) -> Iterator[PlanView]:
    for record in history.records:
        yield PlanView(
            number=record.number,
            age_s=max(0.0, now - record.made_at),
            what=plan_verification.described(record),
            reason=record.reason,
            outcome=record.outcome.value,
            predicted=record.predicted,
            before=record.before,
            measured=record.measured,
            decided=record.decided,
        )


def _waits(scaling: JobScaling, now: float) -> str:
    history = scaling.history
    if scaling.finished:
        return "the job is over"
    if scaling.held:
        return "a user's plan holds"
    if history.open is not None:
        return f"plan {history.open.number} is not verified yet"
    if now < history.quiet_until:
        return f"the last plan was decided; the next one is made in {history.quiet_until - now:.0f} s at the soonest"
    return ""
