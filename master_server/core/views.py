"""Queries, which do not change the state. The answer to a long-poll is None while there is nothing to report."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from dlrover_hooks.errors import GivenUp, Stale
from dlrover_hooks.master.core import heartbeats, node_vitals
from dlrover_hooks.master.core.checkpoints import replica_ring, save_votes
from dlrover_hooks.master.core.effects import (
    check_topic,
    cluster_topic,
    key_topic,
    nodes_topic,
    parting_topic,
    plan_topic,
    roles_topic,
    round_topic,
    shards_topic,
    tasks_topic,
    watch_topic,
)
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job, in_round, knows
from dlrover_hooks.master.core.job_registry import Master, job_named
from dlrover_hooks.master.core.job_scaling import plan_requests
from dlrover_hooks.master.core.leased_data import job_ledgers
from dlrover_hooks.master.core.node_check import check_requests
from dlrover_hooks.master.core.ps_clusters import task_requests
from dlrover_hooks.master.core.roles import role_requests
from dlrover_hooks.master.core.rounds import key_value_store, preemption_agreement, rendezvous
from dlrover_hooks.master.core.rounds.members import Member, census_of, first_gone
from dlrover_hooks.protocol import (
    LISTED_GONE,
    AwaitCheck,
    AwaitCluster,
    AwaitKeys,
    AwaitNodes,
    AwaitParting,
    AwaitPlan,
    AwaitRoles,
    AwaitRound,
    AwaitShards,
    AwaitTasks,
    Beat,
    CheckReport,
    CheckStep,
    DesiredNodes,
    Heartbeat,
    Jobs,
    JobView,
    JobVitals,
    KeyNames,
    KeyValues,
    Leases,
    LedgerView,
    ListJobs,
    ListKeys,
    Locate,
    Located,
    MemberView,
    Message,
    NextVitals,
    NodeVitals,
    Notice,
    Parting,
    Phase,
    Plan,
    Plans,
    PSCluster,
    Roles,
    Seated,
    ShowCheck,
    ShowJob,
    ShowLedger,
    ShowPlans,
    ShowRoles,
    ShowTasks,
    ShowVitals,
    Tasks,
    Unlisted,
    Watch,
)

Poll = (
    AwaitRound
    | AwaitPlan
    | AwaitShards
    | AwaitKeys
    | AwaitNodes
    | AwaitParting
    | AwaitRoles
    | AwaitTasks
    | AwaitCluster
    | AwaitCheck
    | Watch
)


def query(state: Master, nodes: Nodes, request: Message, now: float = 0.0) -> Message | None:
    """The current answer; None: wait for a `Wake` on one of `topics(state, request)`. Raises a MasterError.

    `now`: on the clock of `nodes`; only the age of `ShowVitals`' reports depends on it.
    """
    if isinstance(request, ShowVitals):
        job = job_named(state, request.job)
        return JobVitals(
            job.name,
            nodes=tuple(node_vitals.node_uses(nodes, job, now)),
            ranks=tuple(node_vitals.rank_uses(nodes, job)),
            tasks=tuple(node_vitals.task_uses(nodes, job)),
        )
    return _TABLE[type(request)](state, nodes, request)


def topics(state: Master, request: Poll) -> tuple[str, ...]:
    """The topics of a waiting request; a `Wake` on any of them may change its answer."""
    if isinstance(request, AwaitShards):
        return (shards_topic(request.job, request.name),)
    if isinstance(request, AwaitKeys):
        key = key_value_store.missing(job_named(state, request.job).keys, request.keys)
        return (key_topic(request.job, key or ""), watch_topic(request.job))
    return (_TOPIC[type(request)](request.job),)


def nothing(request: Message) -> Message | None:
    """The answer to a long-poll that timed out; None for `Watch`, which has no timeout."""
    if isinstance(request, AwaitTasks):
        return Tasks(number=request.after)
    if isinstance(request, AwaitRoles):
        return Roles(number=request.after)
    if isinstance(request, AwaitCluster):
        return PSCluster(version=request.after)
    if isinstance(request, AwaitNodes):
        return DesiredNodes(number=request.after)
    return _NOTHING.get(type(request))


def _jobs(state: Master, nodes: Nodes, request: ListJobs) -> Jobs:
    del nodes, request
    return Jobs(jobs=tuple(sorted(state.jobs)))


def _job(state: Master, nodes: Nodes, request: ShowJob) -> JobView:
    job = job_named(state, request.job)
    current = job.rounds.round
    step = heartbeats.furthest(nodes, job.name, current.members) if current else 0
    listed, unlisted = _listed(current, request.node) if current else ([], Unlisted())
    return JobView(
        job=job.name,
        run=job.run,
        attempt=job.attempt,
        round=job.rounds.number,
        phase=current.phase if current else Phase.ATTACHING,
        step=max(step, job.finished_step or 0, job.saves.newest_step),
        members=tuple(_member(nodes, job.name, member) for member in listed),
        unlisted=unlisted,
        lost_nodes=tuple(current.census.dead_nodes[:LISTED_GONE]) if current else (),
        newest_complete=job.saves.newest_complete,
        newest_committed=job.saves.newest_committed,
        unstored=job.saves.unstored,
        restored_from=job.restored_from,
        finished=job.finished,
        finished_step=job.finished_step if job.finished else None,
        begun_step=_begun_step(job, current),
        save_to=job.settings.save_to,
        parting=preemption_agreement.told(job),
        ending=job.ending,
        failures=job.failures,
        recent_failures=_recent(job.failed_at, request.window_s),
        kept_out=check_requests.kept_out(job),
        excluded=job.slow.excluded.get(request.node, ""),
        shares=current.shares if current is not None else None,
        rebalance=current.rebalance if current is not None else "",
    )


def _recent(times: list[float], window_s: float) -> int:
    """How many of the failures at `times` (sorted) happened at most `window_s` before the newest one."""
    return len(times) - bisect.bisect_left(times, times[-1] - window_s) if times else 0


def _listed(current: rendezvous.Round, node: str) -> tuple[list[Member], Unlisted]:
    """The members that a view for `node` lists, by rank, and the counts of all others."""
    if not node:
        return sorted(current.members.values(), key=_rank), Unlisted()
    census, own = current.census, [current.members[name] for name in current.at.get(node, ())]
    here = census_of(own)
    gone = first_gone(census, current.members, node, LISTED_GONE)
    alive = current.live - here.live_at.get(node, 0)
    unlisted = Unlisted(
        alive=alive,
        attached=census.attached - here.attached,
        recovers=census.recovers - here.recovers,
        unended=alive + census.unended - here.unended - sum(not member.ended_well for member in gone),
    )
    return sorted([*own, *gone], key=_rank), unlisted


def _rank(member: Member) -> int:
    return member.rank


def _begun_step(job: Job, current: rendezvous.Round | None) -> int | None:
    if current is None or current.attempt == 0:
        return None
    return job.plan.restore.generation.step if job.plan.restore is not None else 0


def _member(nodes: Nodes, job: str, member: Member) -> MemberView:
    pulse = nodes.pulses.get((job, member.incarnation))
    return MemberView(
        incarnation=member.incarnation,
        node=member.node,
        rank=member.rank,
        local_rank=member.local_rank,
        attached=member.attached,
        alive=member.live,
        step=pulse.step if pulse else 0,
        recovers=member.recovers,
        gone=member.gone or "",
        exit_code=member.exit_code,
        stall=pulse.stall if pulse else None,
        straggler=pulse.straggler if pulse else None,
    )


def _round(state: Master, nodes: Nodes, request: AwaitRound) -> Seated | None:
    del nodes
    job = job_named(state, request.job)
    if job.finished and request.incarnation in job.rounds.waiting:
        raise Stale(f"Job {job.name!r} is finished: no round will form any more.", hint="Join again to get the rest.")
    if job.ending is not None and request.incarnation in job.rounds.waiting:
        raise GivenUp(f"Job {job.name!r} was given up: {job.ending.why}", hint="Launch it again on all nodes.")
    return rendezvous.seated(job.rounds, job.name, request.incarnation, request.after)


def _plan(state: Master, nodes: Nodes, request: AwaitPlan) -> Plan | None:
    del nodes
    job = job_named(state, request.job)
    current = job.rounds.round
    member = rendezvous.member_of(job.rounds, job.name, request.incarnation)
    if current is None or current.phase is Phase.ATTACHING or job.plan.number <= request.after:
        return None
    return Plan(
        number=job.plan.number,
        round=current.number,
        phase=current.phase,
        attempt=job.attempt,
        run=job.run,
        restore=replica_ring.restore_for(job, member),
        cadence=job.saves.cadence,
        refused=job.plan.refused,
        fallbacks=job.plan.fallbacks,
        lost=job.plan.lost,
        replication=replica_ring.replication_of(job, member),
    )


def _locate(state: Master, nodes: Nodes, request: Locate) -> Located:
    del nodes
    job = job_named(state, request.job)
    rendezvous.member_of(job.rounds, job.name, request.incarnation)
    return replica_ring.located(job, request.generation, request.rank)


def _beat(state: Master, nodes: Nodes, request: Heartbeat) -> Beat:
    job = job_named(state, request.job)
    current = job.rounds.round
    if not knows(job, request.incarnation):
        rendezvous.member_of(job.rounds, job.name, request.incarnation)
    return Beat(
        round=current.number if current else 0,
        broken=current is not None and current.phase is Phase.BROKEN,
        newest_complete=job.saves.newest_complete,
        cadence=job.saves.cadence,
        may_complete=save_votes.may_complete(job.saves),
        parting=preemption_agreement.summons(job),
        waiting=job.rounds.newcomers,
        interval_s=heartbeats.interval_s(nodes),
    )


def _node_vitals(state: Master, nodes: Nodes, request: NodeVitals) -> NextVitals:
    del nodes
    return node_vitals.accepted(job_named(state, request.job), request)


def _watch(state: Master, nodes: Nodes, request: Watch) -> Notice | None:
    del nodes
    job = job_named(state, request.job)
    current = job.rounds.round
    if not knows(job, request.incarnation):
        if job.finished:
            return Notice(round=job.rounds.number, finished=True)
        raise Stale(f"Incarnation {request.incarnation!r} is in no round of job {job.name!r}.", hint=rendezvous.REJOIN)
    if current is None:
        return None
    broken = current.phase is Phase.BROKEN
    if current.number > request.after and (broken or job.finished):
        return Notice(current.number, broken, job.finished, rebalance=current.rebalance)
    if job.ending is not None and request.incarnation not in current.members:
        return Notice(round=current.number, finished=True)
    told = request.parting if request.incarnation in current.members else None
    if told is not None and told < current.number and preemption_agreement.summons(job):
        return Notice(round=current.number, waiting=request.waiting, parting=True)
    waiting = job.rounds.newcomers
    if waiting == request.waiting or not rendezvous.regroups(current, request.incarnation):
        return None
    return Notice(round=current.number, waiting=waiting)


def _parting(state: Master, nodes: Nodes, request: AwaitParting) -> Parting | None:
    del nodes
    return preemption_agreement.awaited(job_named(state, request.job), request)


def _shards(state: Master, nodes: Nodes, request: AwaitShards) -> Leases | None:
    del nodes
    return job_ledgers.state(job_named(state, request.job), request)


def _keys(state: Master, nodes: Nodes, request: AwaitKeys) -> KeyValues | None:
    del nodes
    job = job_named(state, request.job)
    current = in_round(job, request.incarnation, request.round)
    key = key_value_store.missing(job.keys, request.keys)
    if key is None:
        return KeyValues(tuple(job.keys.values[name] for name in request.keys))
    if current.phase is Phase.BROKEN:
        raise Stale(
            f"Round {current.number} of job {job.name!r} lost a member: no member may be left to set {key!r}.",
            hint="Join again.",
        )
    return None


def _key_names(state: Master, nodes: Nodes, request: ListKeys) -> KeyNames:
    del nodes
    job = job_named(state, request.job)
    in_round(job, request.incarnation, request.round)
    return KeyNames(tuple(job.keys.values))


def _ledger(state: Master, nodes: Nodes, request: ShowLedger) -> LedgerView:
    del nodes
    return job_ledgers.view(job_named(state, request.job), request.name)


def _tasks(state: Master, nodes: Nodes, request: ShowTasks) -> Tasks:
    del nodes
    return task_requests.show(job_named(state, request.job))


def _awaited_tasks(state: Master, nodes: Nodes, request: AwaitTasks) -> Tasks | None:
    del nodes
    return task_requests.awaited_tasks(job_named(state, request.job), request)


def _awaited_cluster(state: Master, nodes: Nodes, request: AwaitCluster) -> PSCluster | None:
    del nodes
    return task_requests.awaited_cluster(job_named(state, request.job), request)


def _roles(state: Master, nodes: Nodes, request: ShowRoles) -> Roles:
    del nodes
    return role_requests.show(job_named(state, request.job), request.role, state.now)


def _awaited_roles(state: Master, nodes: Nodes, request: AwaitRoles) -> Roles | None:
    del nodes
    return role_requests.awaited(job_named(state, request.job), request, state.now)


def _check(state: Master, nodes: Nodes, request: ShowCheck) -> CheckReport:
    del nodes
    return check_requests.show(job_named(state, request.job), request)


def _awaited_check(state: Master, nodes: Nodes, request: AwaitCheck) -> CheckStep | None:
    del nodes
    return check_requests.awaited(job_named(state, request.job), request)


def _plans(state: Master, nodes: Nodes, request: ShowPlans) -> Plans:
    del nodes
    return plan_requests.show(job_named(state, request.job), state.now)


def _awaited_nodes(state: Master, nodes: Nodes, request: AwaitNodes) -> DesiredNodes | None:
    del nodes
    return plan_requests.awaited(job_named(state, request.job), request)


_TABLE: dict[type[Message], Callable[[Master, Nodes, Any], Message | None]] = {
    ListJobs: _jobs,
    ShowJob: _job,
    AwaitRound: _round,
    AwaitPlan: _plan,
    Locate: _locate,
    Heartbeat: _beat,
    NodeVitals: _node_vitals,
    Watch: _watch,
    AwaitShards: _shards,
    AwaitKeys: _keys,
    ListKeys: _key_names,
    AwaitParting: _parting,
    ShowLedger: _ledger,
    ShowTasks: _tasks,
    AwaitTasks: _awaited_tasks,
    AwaitCluster: _awaited_cluster,
    ShowRoles: _roles,
    AwaitRoles: _awaited_roles,
    ShowPlans: _plans,
    AwaitNodes: _awaited_nodes,
    ShowCheck: _check,
    AwaitCheck: _awaited_check,
}
_TOPIC: dict[type[Message], Callable[[str], str]] = {
    AwaitRound: round_topic,
    AwaitPlan: plan_topic,
    AwaitParting: parting_topic,
    AwaitRoles: roles_topic,
    AwaitTasks: tasks_topic,
    AwaitNodes: nodes_topic,
    AwaitCluster: cluster_topic,
    AwaitCheck: check_topic,
    Watch: watch_topic,
}
_NOTHING: dict[type[Message], Message] = {
    AwaitRound: Seated(),
    AwaitPlan: Plan(),
    AwaitShards: Leases(),
    AwaitKeys: KeyValues(),
    AwaitParting: Parting(again=True),
    AwaitCheck: CheckStep(),
}
