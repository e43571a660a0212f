"""The last report of each node about what it uses. Like `heartbeats` not journaled: a restarted master gets new ones.

A report is kept while its node has live members in the round or waits for ranks: O(1) per report, and O(workers of the
node) when one of them leaves. Those of a parameter server job are kept until it is finished: its launchers are no part
of it, so each may report.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core.heartbeats import KeptVitals, Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.rounds import rendezvous
from dlrover_hooks.protocol import (
    NextVitals,
    NodeUse,
    NodeVitals,
    RankUse,
    TaskUse,
    WorkerProcesses,
)

EVERY_S = 5.0
"""Interval of the reports. In a job whose plans follow each other fast, half of a window."""


def accepted(job: Job, report: NodeVitals) -> NextVitals:
    """The reply to a report. Raises Stale if the node, or the agent, is not one of the job's."""
    if _has_tasks(job) or (rendezvous.knows(job.rounds, report.incarnation) and _belongs(job, report.node)):
        window_s = job.scaling.history.pace.window_s if job.scaling is not None else 2 * EVERY_S
        return NextVitals(min(EVERY_S, window_s / 2))
    raise Stale(f"Node {report.node!r} has no workers in job {job.name!r}.", hint=rendezvous.REJOIN)


def keep(nodes: Nodes, report: NodeVitals, now: float) -> None:
    """Replace the node's last report by this one, which was accepted."""
    kept = nodes.reports.setdefault(report.job, {})
    before, core_s, most_bytes = kept.get(report.node), dict[str, float](), dict[str, int]()
    for tree in trees(report):
        name, used, most = tree.incarnation, 0.0, 0
        if before is not None and name in before.core_s:
            used = before.core_s[name] + tree.cpu_percent / 100 * (now - before.at)
            most = before.most_bytes[name]
        core_s[name], most_bytes[name] = used, max(most, tree.memory_bytes)
    kept[report.node] = KeptVitals(report, now, core_s, most_bytes)


def trees(report: NodeVitals) -> list[WorkerProcesses]:
    """Of the workers, and of the launcher with the keeper and the standbys."""
    return [*report.workers, *([report.launcher] if report.launcher is not None else [])]


def parted(nodes: Nodes, job: Job, incarnation: str) -> None:
    """An agent or a worker has left: forget its node's report if no other one of the node is left."""
    node = rendezvous.node_of(job.rounds, incarnation)
    if node is not None and not _belongs(job, node):
        nodes.reports.get(job.name, {}).pop(node, None)


def round_formed(nodes: Nodes, job: Job) -> None:
    """Forget the reports of nodes that the new round has left behind."""
    kept = nodes.reports.get(job.name, {})
    for node in [node for node in kept if not _belongs(job, node)]:
        del kept[node]


def forget_all_but(nodes: Nodes, jobs: dict[str, Job]) -> None:
    """Forget the reports of jobs that the master keeps no more."""
    for name in nodes.reports.keys() - jobs.keys():
        del nodes.reports[name]


def node_uses(nodes: Nodes, job: Job, now: float) -> Iterator[NodeUse]:
    """What the job's nodes use, by name. `now`: on the clock of `nodes`."""
    for node, kept in sorted(nodes.reports.get(job.name, {}).items()):
        if _belongs(job, node):
            report, age_s = kept.report, max(0.0, now - kept.at)
            yield NodeUse(node, age_s, report.cpu, report.memory, report.network, report.disk)


def rank_uses(nodes: Nodes, job: Job) -> Iterator[RankUse]:
    """What the live members of the round use, by rank."""
    reports, current = nodes.reports.get(job.name, {}), job.rounds.round
    for member in sorted(current.members.values() if current is not None else (), key=lambda member: member.rank):
        if not member.live:
            continue
        pulse, kept = nodes.pulses.get((job.name, member.incarnation)), reports.get(member.node)
        trees = kept.report.workers if kept is not None else ()
        yield RankUse(
            rank=member.rank,
            local_rank=member.local_rank,
            node=member.node,
            incarnation=member.incarnation,
            step=pulse.step if pulse else 0,
            vitals=pulse.vitals if pulse else None,
            processes=next((tree for tree in trees if tree.incarnation == member.incarnation), None),
            stall=pulse.stall if pulse else None,
            phases=pulse.phases if pulse else None,
            straggler=pulse.straggler if pulse else None,
        )


def task_uses(nodes: Nodes, job: Job) -> Iterator[TaskUse]:
    """What the registered tasks of a parameter server job use, by id."""
    reports = nodes.reports.get(job.name, {})
    trees = {tree.incarnation: (node, tree) for node, kept in reports.items() for tree in kept.report.workers}
    for task in job.ps.tasks if job.ps is not None else ():
        if task.incarnation:
            node, tree = trees.get(task.incarnation, ("", None))
            yield TaskUse(task.type, task.index, task.status, task.resource, node, tree)


def _has_tasks(job: Job) -> bool:
    return job.ps is not None and not job.ps.finished


def _belongs(job: Job, node: str) -> bool:
    if _has_tasks(job):
        return True
    rounds = job.rounds
    return node in rounds.waiting_at or rendezvous.lives(rounds, node)
