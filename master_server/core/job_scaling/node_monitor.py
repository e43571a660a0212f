"""Makes the samples of a job from heartbeats and from the reports of its nodes. Pure, and not journaled."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_hooks.master.core.heartbeats import KeptVitals, Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.master.core.node_vitals import trees
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters, find, live_chief
from dlrover_hooks.protocol import (
    JobSample,
    NodeResource,
    NodeSample,
    NodeStatus,
    NodeType,
    WorkerProcesses,
)

MIB = 1 << 20
NO_STEP = 6
"""After so many windows without a step the job stands still, and does not only make long steps."""


class _StepSeen(NamedTuple):
    """A step of the job, and when it was reported."""

    step: int
    at: float


class _Measured(NamedTuple):
    """A node at one time. `life`: of its processes; others in their place are another node. `core_s`: core-seconds that
    they have used until the report that arrived `at`; `memory`: the highest MiB until then."""

    life: str
    name: str
    type: NodeType
    resource: NodeResource
    core_s: float
    memory: int
    at: float

    def since(self, began: _Measured) -> NodeSample:
        """What it has used since then."""
        cpu = (self.core_s - began.core_s) / (self.at - began.at)
        return NodeSample(self.name, self.type, self.resource, max(0.0, cpu), self.memory)


class NodeMonitor:
    """Measures one job, window after window."""

    def __init__(self) -> None:
        self._began: list[_Measured] = []
        self._step = _StepSeen(0, 0.0)

    def sample(self, known: Nodes, job: Job, scaling: JobScaling) -> JobSample | None:
        """What was measured since the last sample.

        None, and a new window begins: the nodes changed within this one, or the job's processes were started again.
        None, and the window goes on: a node, or a new step, has not been reported since it began. Without a step for
        `NO_STEP` windows the speed is 0.
        """
        found = _tasks(known, job, job.ps) if job.ps is not None else _nodes(known, job, scaling)
        progress, before, step = _progress(known, job), self._began, self._step
        same = bool(found) and [one[:4] for one in found] == [one[:4] for one in before]
        same = same and 0 < step.step <= progress.step
        if same and any(one.at <= began.at for one, began in zip(found, before, strict=True)):
            return None
        longest_s = NO_STEP * scaling.history.pace.window_s
        if same and progress == step and found[0].at < before[0].at + longest_s:
            return None
        self._began, self._step = found, progress
        if not same:
            return None
        seconds = progress.at - step.at
        nodes = tuple(one.since(began) for one, began in zip(found, before, strict=True))
        return JobSample((progress.step - step.step) / seconds if seconds > 0 else 0.0, nodes)


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
            found.append(_measured(node.name, NodeType.WORKER, node.config_resource, kept, trees(kept.report)))
    return found


def _tasks(known: Nodes, job: Job, clusters: PSClusters) -> list[_Measured]:
    """The servers and workers of the cluster that the chief is connected to; none while it switches to another one."""
    version, found = clusters.acknowledged, list[_Measured]()
    if version is None or clusters.pending or clusters.void:
        return []
    reports = known.reports.get(job.name, {}).values()
    by_task = {tree.incarnation: (kept, tree) for kept in reports for tree in kept.report.workers}
    for number in (*version.ps, *version.workers):
        task = find(clusters, number)
        if task is None or task.incarnation not in by_task:
            return []
        kept, tree = by_task[task.incarnation]
        found.append(_measured(task.name, task.type, task.resource, kept, [tree]))
    return found


def _measured(
    name: str, kind: NodeType, resource: NodeResource, kept: KeptVitals, of_node: list[WorkerProcesses]
) -> _Measured:
    """Memory that processes share counts for each of them, so a limit above that is too high rather than too low."""
    names = sorted(tree.incarnation for tree in of_node)
    core_s, memory = sum(kept.core_s[one] for one in names), sum(kept.most_bytes[one] for one in names) // MIB
    return _Measured(" ".join(names), name, kind, resource, core_s, memory, kept.at)
