"""Makes the samples of a job from heartbeats and from the reports of its nodes. Pure, and not journaled."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.protocol import JobSample, NodeSample, NodeStatus, NodeType, NodeVitals

MIB = 1 << 20


class _StepSeen(NamedTuple):
    """A step of the job, and when it was reported."""

    step: int
    at: float


class NodeMonitor:
    """Measures one job, window after window."""

    def __init__(self) -> None:
        self._nodes: tuple[NodeSample, ...] = ()
        self._began = _StepSeen(0, 0.0)

    def sample(self, known: Nodes, job: Job, scaling: JobScaling) -> JobSample | None:
        """What was measured since the last call.

        None, and a new window begins: the nodes changed within this one, no step was reported, or the job's processes
        were started again.
        """
        nodes = tuple(_measured(known, job, scaling))
        progress = _progress(known, job)
        before, began = self._nodes, self._began
        self._nodes, self._began = nodes, progress
        same = [_identity(node) for node in nodes] == [_identity(node) for node in before]
        if not nodes or not same or not began.step or progress.step < began.step:
            return None
        seconds = progress.at - began.at
        return JobSample((progress.step - began.step) / seconds if seconds > 0 else 0.0, nodes)


def _identity(node: NodeSample) -> tuple[object, ...]:
    return node.name, node.config_resource


def _progress(known: Nodes, job: Job) -> _StepSeen:
    """The greatest step of the live members, and when it was reported first."""
    current = job.rounds.round
    names = [one.incarnation for one in current.members.values() if one.live] if current is not None else []
    pulses = [known.pulses[job.name, name] for name in names if (job.name, name) in known.pulses]
    step = max((pulse.step for pulse in pulses), default=0)
    return _StepSeen(step, min((pulse.step_at for pulse in pulses if pulse.step == step), default=0.0))


def _measured(known: Nodes, job: Job, scaling: JobScaling) -> list[NodeSample]:
    """The nodes that run and have workers in the round, with what their processes use."""
    current = job.rounds.round
    training = {one.node for one in current.members.values() if one.live} if current is not None else set[str]()
    reports, found = known.reports.get(job.name, {}), list[NodeSample]()
    for record in scaling.present:
        node = record.shown
        if record.status is NodeStatus.RUNNING and node.name in training:
            kept = reports.get(node.name)
            cpu, memory = _used(kept.report) if kept is not None else (0.0, 0)
            found.append(NodeSample(node.name, NodeType.WORKER, node.config_resource, cpu, memory))
    return found


def _used(report: NodeVitals) -> tuple[float, int]:
    """Cores and MiB of the workers, the launcher, the keeper and the standbys. Memory that they share counts for each
    of them, so a limit above that is too high rather than too low."""
    trees = [*report.workers, *([report.launcher] if report.launcher is not None else [])]
    return sum(tree.cpu_percent for tree in trees) / 100, sum(tree.memory_bytes for tree in trees) // MIB
