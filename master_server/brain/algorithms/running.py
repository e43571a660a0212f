"""Plans for a job that runs: by its fitted model, within its share of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.master.brain.algorithms.speeds import curve, kind_of, optimizer_of, units_of
from dlrover_hooks.master.brain.records import ActiveJob, ClusterView, JobRecord, PastJob, Proposal, SpeedPoint
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.master.scaling.allocation import FAIRNESS, TIME_LIMIT_S, Demand, JobConfiguration, allocate
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import JobSample, NodeGroupResource, NodeType, ResourcePlan


def fitted_model(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """The plan of the model alone; nothing changes while it is not determined."""
    optimizer = optimizer_of(job)
    plan = optimizer.generate_resource_plan_with_optimizer()
    if plan.empty:
        return Proposal(plan, "by the model no other configuration pays")
    speeds = optimizer.speeds()
    return Proposal(plan, "by the fitted model", speeds.get(_counts(plan, job.samples[-1], job.registration.ps)))


def running(
    job: JobRecord, history: Sequence[PastJob], cluster: ClusterView, config: Mapping[str, Any]
) -> Proposal | None:
    """The optimizer of the single job; where jobs want more than the cluster has, the job's share of it."""
    samples = job.recent(1)
    if not samples:
        return None
    optimizer = optimizer_of(job)
    plan, speeds, sample = optimizer.generate_opt_plan(OptimizeStage.RUNNING), optimizer.speeds(), samples[-1]
    made = curve(sample, speeds)
    reason = "no other configuration pays, by what was measured" if plan.empty else "by its own measurements"
    alone = Proposal(plan, reason, speeds.get(_counts(plan, sample, job.registration.ps)), made)
    share = _share(job, sample, plan, made, cluster, float(config.get("fairness", FAIRNESS)))
    if share is None:
        return alone
    if share.units == units_of(sample):
        return Proposal(ResourcePlan(), "its share of the cluster is what it has", curve=made)
    plan = _plan_for(share, sample)
    return Proposal(plan, f"its share of the cluster: {share.units} {kind_of(sample)}", share.speed, made)


def _share(
    job: JobRecord, sample: JobSample, plan: ResourcePlan, made: tuple[SpeedPoint, ...], cluster: ClusterView,
    fairness: float,
) -> SpeedPoint | None:  # fmt: skip
    """What the job gets when the cluster is divided. None: the cluster has room for all jobs, or that is not known."""
    kind, now, told = kind_of(sample), units_of(sample), job.registration
    capacity = cluster.capacity.get(kind, 0)
    others = [one for one in cluster.jobs if one.job != told.job and one.kind == kind and one.curve]
    if not capacity or not others or not made:
        return None
    quotas = dict(cluster.quotas)
    asked = max(units_of(_planned(sample, plan)), made[-1].units)
    wanted = asked + sum(one.curve[-1].units for one in others)
    of_tenant = asked + sum(one.curve[-1].units for one in others if one.tenant == told.tenant)
    if wanted <= capacity and of_tenant <= quotas.get(told.tenant, of_tenant):
        return None
    own = ActiveJob(told.job, kind, now, made, told.tenant, told.weight, job.age_s)
    demands = [_demand(one) for one in (own, *others)]
    given = allocate(demands, {kind: capacity}, quotas, fairness=fairness, time_limit_s=TIME_LIMIT_S).given
    units = given[told.job].nodes if told.job in given else made[0].units
    free = capacity - sum(one.units for one in others)
    if units > now and units > free:  # others have to give it up first
        fitting = [one for one in made if one.units <= free]
        return max(fitting, key=lambda one: one.units) if fitting and fitting[-1].units > now else _as_it_is(sample)
    return next((one for one in made if one.units == units), None)


def _as_it_is(sample: JobSample) -> SpeedPoint:
    ps, workers = len(sample.of(NodeType.PS)), len(sample.of(NodeType.WORKER))
    return SpeedPoint(units_of(sample), ps, workers, sample.speed)


def _demand(one: ActiveJob) -> Demand:
    configurations = tuple(JobConfiguration(one.kind, point.units, point.speed) for point in one.curve)
    return Demand(one.job, configurations, one.tenant, one.weight, (one.kind, one.units), one.age_s, one.plans)


def _planned(sample: JobSample, plan: ResourcePlan) -> JobSample:
    """The nodes with the plan, for counting."""
    nodes = [node for node in sample.nodes if node.type.value not in plan.node_group_resources]
    nodes = [
        msgspec.structs.replace(node, config_resource=plan.node_resources.get(node.name, node.config_resource))
        for node in nodes
    ]
    for name, group in plan.node_group_resources.items():
        like = sample.of(NodeType(name)) or list(sample.nodes)
        made = msgspec.structs.replace(like[0], type=NodeType(name), config_resource=group.node_resource)
        nodes += [made] * group.count
    return msgspec.structs.replace(sample, nodes=tuple(nodes))


def _plan_for(share: SpeedPoint, sample: JobSample) -> ResourcePlan:
    groups = {
        name: NodeGroupResource(count, sample.largest(NodeType(name)))
        for name, count in ((rules.PS, share.ps), (rules.WORKER, share.workers))
        if count and count != len(sample.of(NodeType(name)))
    }
    return ResourcePlan(groups)


def _counts(plan: ResourcePlan, sample: JobSample, ps: bool) -> tuple[int, ...]:
    kinds = (rules.PS, rules.WORKER) if ps else (rules.WORKER,)
    groups = plan.node_group_resources
    return tuple(groups[name].count if name in groups else len(sample.of(NodeType(name))) for name in kinds)
