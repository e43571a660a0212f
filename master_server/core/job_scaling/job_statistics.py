"""What was measured of a job: the newest samples, and the speed of each configuration that it has had.

Pure and journaled with the job, so that a restarted master plans from what it knew before.
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import JobSample, NodeType

RECENT = 5
"""Samples that the rules use, and that each configuration keeps."""
CONFIGURATIONS = 64
"""Configurations whose speed is kept; the one that was measured longest ago is forgotten first."""
Configuration = tuple[int, ...]
"""(servers, workers) of a job with parameter servers, (workers,) of another one."""


class MeasuredSpeed(msgspec.Struct, frozen=True):
    """The last speeds of one configuration, in steps per second."""

    configuration: Configuration
    speeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of these speeds."""
        return sum(self.speeds) / len(self.speeds)


class JobStatistics(msgspec.Struct, frozen=True):
    """`recent`: the newest samples with the present nodes. `measured`: the configuration measured last comes last."""

    recent: tuple[JobSample, ...] = ()
    measured: tuple[MeasuredSpeed, ...] = ()


def observed(statistics: JobStatistics, sample: JobSample, *, ps: bool) -> JobStatistics:
    """With what was measured over one window. A sample without progress counts for the rules only.

    With nodes of other sizes than before, the speeds of all configurations are forgotten: they were those of other
    nodes. Raises `UsageError` for a sample without workers, or without servers in a job that has them.
    """
    current, recent, measured = configuration(sample, ps=ps), statistics.recent, statistics.measured
    if not all(current):
        kinds = "parameter servers and workers" if ps else "workers"
        raise UsageError(f"sample of a job: it has {current} nodes", hint=f"a sample needs {kinds}")
    if recent and _sizes(recent[-1]) != _sizes(sample):
        recent, measured = (), ()
    if recent and configuration(recent[-1], ps=ps) != current:
        recent = ()  # the use of other nodes says nothing about these
    if sample.speed > 0:
        before = next((one.speeds for one in measured if one.configuration == current), ())
        others = [one for one in measured if one.configuration != current]
        measured = (*others, MeasuredSpeed(current, (*before, sample.speed)[-RECENT:]))[-CONFIGURATIONS:]
    return JobStatistics((*recent, sample)[-RECENT:], measured)


def configuration(sample: JobSample, *, ps: bool) -> Configuration:
    """How many nodes of each type the sample has."""
    workers = len(sample.of(NodeType.WORKER))
    return (len(sample.of(NodeType.PS)), workers) if ps else (workers,)


def _sizes(sample: JobSample) -> set[tuple[NodeType, float, int]]:
    """What the nodes compute with. Memory is left out: more of it does not make a node faster."""
    return {(node.type, node.config_resource.cpu, node.config_resource.gpu_num) for node in sample.nodes}
