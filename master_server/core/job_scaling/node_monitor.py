"""Makes the samples of a job from heartbeats and from the reports of its nodes. Pure, and not journaled."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters, find, live_chief
from dlrover_hooks.protocol import (
    JobSample,
    NodeResource,
    NodeSample,
    NodeStatus,
    NodeType,
    NodeVitals,
    WorkerProcesses,
)

MIB = 1 << 20


class _StepSeen(NamedTuple):
    """A step of the job, and when it was reported."""

    step: int
    at: float


class _Measured(NamedTuple):
    """A node, and which life of it: another process in its place is another node."""

    life: str
    node: NodeSample


class NodeMonitor:
    """Measures one job, window after window."""

    def __init__(self) -> None:
        self._lives: list[tuple[str, str, NodeResource]] = []
        self._began = _StepSeen(0, 0.0)

    def sample(self, known: Nodes, job: Job, scaling: JobScaling) -> JobSample | None:
        """What was measured since the last call.

        None, and a new window begins: the nodes changed within this one, no step was reported, a node has not reported
        what it uses, or the job's processes were started again.
        """
        found = _tasks(known, job, job.ps) if job.ps is not None else _nodes(known, job, scaling)
        progress = _progress(known, job)
        before, began = self._lives, self._began
        self._lives, self._began = [(one.life, one.node.name, one.node.config_resource) for one in found], progress
        if not found or self._lives != before or not began.step or progress.step < began.step:
            return None
        seconds = progress.at - began.at
        nodes = tuple(one.node for one in found)
        return JobSample((progress.step - began.step) / seconds if seconds > 0 else 0.0, nodes)


def _progress(known: Nodes, job: Job) -> _StepSeen:
    """The greatest step of the live members, or of the chief, and when it was reported first."""
    pulses = [known.pulses[job.name, name] for name in _stepping(job) if (job.name, name) in known.pulses]
    step = max((pulse.step for pulse in pulses), default=0)
    return _StepSeen(step, min((pulse.step_at for pulse in pulses if pulse.step == step), default=0.0))


def _stepping(job: Job) -> list[str]:
    """Incarnations of the processes that count the steps."""
    if job.ps is not None:
        chief = live_chief(job.ps)
        return [chief.incarnation] if chief is not None else []
    current = job.rounds.round
    return [one.incarnation for one in current.members.values() if one.live] if current is not None else []


def _nodes(known: Nodes, job: Job, scaling: JobScaling) -> list[_Measured]:
    """The nodes that run and have workers in the round, with what their processes use."""
    current = job.rounds.round
    training = {one.node for one in current.members.values() if one.live} if current is not None else set[str]()
    reports, found = known.reports.get(job.name, {}), list[_Measured]()
    for record in scaling.present:
        node = record.shown
        if record.status is NodeStatus.RUNNING and node.name in training:
            if (kept := reports.get(node.name)) is None:
                return []
            used = _used(_trees(kept.report))
            found.append(_Measured("", NodeSample(node.name, NodeType.WORKER, node.config_resource, *used)))
    return found


def _tasks(known: Nodes, job: Job, clusters: PSClusters) -> list[_Measured]:
    """The servers and workers of the cluster that the chief is connected to; none while it switches to another one."""
    version, found = clusters.acknowledged, list[_Measured]()
    if version is None or clusters.pending or clusters.void:
        return []
    reports = known.reports.get(job.name, {}).values()
    trees = {tree.incarnation: tree for kept in reports for tree in kept.report.workers}
    for number in (*version.ps, *version.workers):
        task = find(clusters, number)
        if task is None or task.incarnation not in trees:
            return []
        used = _used([trees[task.incarnation]])
        found.append(_Measured(task.incarnation, NodeSample(task.name, task.type, task.resource, *used)))
    return found


def _trees(report: NodeVitals) -> list[WorkerProcesses]:
    """Of the workers, the launcher, the keeper and the standbys."""
    return [*report.workers, *([report.launcher] if report.launcher is not None else [])]


def _used(trees: list[WorkerProcesses]) -> tuple[float, int]:
    """Cores and MiB. Memory that processes share counts for each of them, so a limit above that is too high rather than
    too low."""
    return sum(tree.cpu_percent for tree in trees) / 100, sum(tree.memory_bytes for tree in trees) // MIB
