"""Requests about a job whose nodes are planned, and the master's own events: a window was measured, a plan was made."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.effects import PlanDue, Wake, nodes_topic
from dlrover_hooks.master.core.events import PlanMade, Sampled
from dlrover_hooks.master.core.job import Effects, Job, arm
from dlrover_hooks.master.core.job_scaling import job_statistics, plan_verification
from dlrover_hooks.master.core.job_scaling.job_statistics import JobStatistics
from dlrover_hooks.master.core.job_scaling.plan_verification import PlanHistory
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling, desired
from dlrover_hooks.master.core.job_scaling.worker_manager import WorkerManager
from dlrover_hooks.protocol import (
    AwaitNodes,
    DesiredNodes,
    Done,
    NodeGroupResource,
    NodeResource,
    NodeType,
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
    if job.ps is not None:
        raise BadRequest(
            f"Job {job.name!r} has parameter servers: its nodes are not planned.",
            hint="Scale it with dlrover-hooks scale, or give the new job another name (--job).",
        )
    scaling = job.scaling or JobScaling(event.mode, event.limits)
    scaling.mode, scaling.limits = event.mode, event.limits
    scaling.relaunches, scaling.relaunch_window_s = event.relaunches, event.relaunch_window_s
    scaling.user, scaling.script_hash = event.user, event.script_hash
    scaling.history = plan_verification.at_pace(scaling.history, event.pace)
    job.scaling = scaling
    WorkerManager(scaling, now).forget_processes()
    scaling.workers = min(scaling.workers, event.limits.max_workers)
    if scaling.workers:
        scaling.workers = max(scaling.workers, event.limits.min_workers)
    return _follow(job, scaling, now, effects)


def sampled(job: Job, event: Sampled, now: float, effects: Effects) -> Done:
    """A window was measured: a plan may have to be taken back. Raises Stale, UsageError."""
    scaling = _scaling(job)
    scaling.statistics = job_statistics.observed(scaling.statistics, event.sample, ps=False)
    scaling.history, rollback = plan_verification.observed(scaling.history, event.sample, now)
    if not rollback.empty:
        _carry_out(scaling, rollback, now)
    _follow(job, scaling, now, effects)
    return Done()


def made(job: Job, event: PlanMade, now: float, effects: Effects) -> Done:
    """The optimizer has made a plan. It may be empty, if only the stage changes. Raises Stale, UsageError."""
    scaling, plan = _scaling(job), event.plan
    if scaling.held and not event.answers_out_of_memory:
        raise Stale(f"The plan of job {job.name!r} comes too late: a user's plan holds.")
    _check(job, plan)
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
        before = _as_plan(scaling)
        scaling.history = plan_verification.carried_out(scaling.history, plan, now, event.reason, before)
    scaling.stage = event.stage
    if event.answers_out_of_memory:
        scaling.out_of_memory = ()
    if not plan.empty:
        _carry_out(scaling, plan, now)
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
        group = plan.node_group_resources[NodeType.WORKER.value]
        if group.node_resource == NodeResource():
            plan = ResourcePlan({NodeType.WORKER.value: NodeGroupResource(group.count, scaling.worker_resource)})
        before = _as_plan(scaling)
        scaling.history = plan_verification.carried_out(scaling.history, plan, now, "asked for by a user", before)
        _carry_out(scaling, plan, now)
    scaling.held = not event.release
    return _follow(job, scaling, now, effects)


def report(job: Job, event: ReportNodes, now: float, effects: Effects) -> Done:
    """Nodes run, or have ended. Raises Stale."""
    scaling = _scaling(job)
    manager = WorkerManager(scaling, now)
    for change in event.changes:
        manager.change(change)
    _follow(job, scaling, now, effects)
    return Done()


def awaited(job: Job, request: AwaitNodes) -> DesiredNodes | None:
    """The answer to a long-poll; None: the list is the one that the sender has. Raises Stale."""
    scaling = _scaling(job)
    return desired(scaling) if scaling.number != request.after else None


def tick(job: Job, now: float, effects: Effects) -> None:
    """A deadline was reached: nodes may not have started in time."""
    scaling = job.scaling
    if scaling is None or scaling.due > now:
        return
    scaling.history, rollback = plan_verification.not_started(scaling.history, now)
    if not rollback.empty:
        _carry_out(scaling, rollback, now)
    _follow(job, scaling, now, effects)


def _carry_out(scaling: JobScaling, plan: ResourcePlan, now: float) -> None:
    """Make the nodes those of `plan`.

    With cores other than before, what was measured is forgotten: it was the speed of other nodes.
    """
    group = plan.node_group_resources.get(NodeType.WORKER.value)
    if group is None:
        return
    before = scaling.worker_resource
    WorkerManager(scaling, now).carry_out(group)
    if (before.cpu, before.gpu_num) != (group.node_resource.cpu, group.node_resource.gpu_num):
        scaling.statistics = JobStatistics()


def show(job: Job, now: float) -> Plans:
    """The answer to `ShowPlans`. Raises Stale."""
    scaling = _scaling(job)
    speeds = scaling.history.speeds
    return Plans(
        job=job.name,
        mode=scaling.mode,
        held=scaling.held,
        nodes=desired(scaling).nodes,
        plans=tuple(_views(scaling.history, now)),
        waits=_waits(scaling, now),
        speed=speeds[-1] if speeds else None,
        problem=scaling.failure or scaling.problem,
    )


def _follow(job: Job, scaling: JobScaling, now: float, effects: Effects) -> DesiredNodes:
    """What follows from a change: missing nodes, a message to what starts them, a plan that is due."""
    WorkerManager(scaling, now).settle()
    effects.append(PlanDue(job=job.name))
    if scaling.number != scaling.told:
        scaling.told = scaling.number
        effects.append(Wake(topic=nodes_topic(job.name)))
    arm(job, now, effects)
    return desired(scaling)


def _scaling(job: Job) -> JobScaling:
    if job.scaling is None:
        raise Stale(
            f"The nodes of job {job.name!r} are not planned by this master.",
            hint="Start it with dlrover-hooks run --mode single-job.",
        )
    return job.scaling


def _as_plan(scaling: JobScaling) -> ResourcePlan:
    """What the job has; empty before its first plan."""
    group = NodeGroupResource(scaling.workers, scaling.worker_resource)
    return ResourcePlan({NodeType.WORKER.value: group} if scaling.workers else {})


def _check(job: Job, plan: ResourcePlan) -> None:
    kinds = {NodeType.WORKER.value}
    if other := sorted(set(plan.node_group_resources) - kinds) or sorted(plan.node_resources):
        raise BadRequest(
            f"A plan for {other[0]!r}: job {job.name!r} has only workers, which all have one size.",
            hint="Give the number of workers, or the size of all of them.",
        )


def _check_limits(job: Job, plan: ResourcePlan, limits: ResourceLimits) -> None:
    group = plan.node_group_resources[NodeType.WORKER.value]
    if not limits.min_workers <= group.count <= limits.max_workers:
        raise BadRequest(
            f"Job {job.name!r} may have {limits.min_workers} to {limits.max_workers} workers, not {group.count}.",
            hint="Start it again with other --min-workers and --max-workers.",
        )


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
