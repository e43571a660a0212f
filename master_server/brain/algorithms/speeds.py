"""The fitted models of a job's speed: the optimizer that knows its samples, and the curve of what nodes bring."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dlrover_hooks.master.brain.records import JobRecord, SpeedPoint
from dlrover_hooks.master.scaling.local_optimizer import PAYS, Configuration, LocalOptimizer
from dlrover_hooks.protocol import JobSample, NodeResource, NodeType

POINTS = 12
"""Of a curve at most: an allocation has a variable for each."""


def optimizer_of(job: JobRecord) -> LocalOptimizer:
    """An optimizer that has seen the samples of the job."""
    told = job.registration
    made = LocalOptimizer(
        told.limits, ps=told.ps, global_batch=told.global_batch, workers_per_host=told.workers_per_host
    )
    for sample in job.samples:
        if sample.of(NodeType.WORKER) and (not told.ps or sample.of(NodeType.PS)):
            made.observe(sample)
    return made


def kind_of(sample: JobSample) -> str:
    """What the job occupies: GPUs of a type, or cores ("cpu")."""
    worker = sample.largest(NodeType.WORKER)
    return worker.gpu_type or "gpu" if worker.gpu_num else "cpu"


def units_of(sample: JobSample) -> int:
    """How many of `kind_of` all nodes have."""
    return _units(kind_of(sample), [node.config_resource for node in sample.nodes])


def _units(kind: str, nodes: list[NodeResource]) -> int:
    return max(1, math.ceil(sum(one.cpu if kind == "cpu" else one.gpu_num for one in nodes)))


def curve(sample: JobSample, speeds: Mapping[Configuration, float]) -> tuple[SpeedPoint, ...]:
    """For more and more units the fastest configuration that they are enough for, up to the first that has the share
    `PAYS` of the best speed: nothing beyond pays.
    """
    if not speeds:
        return ()
    server, worker, kind = sample.largest(NodeType.PS), sample.largest(NodeType.WORKER), kind_of(sample)
    points = []
    for configuration, speed in speeds.items():
        ps, workers = (0, *configuration)[-2:]
        points.append(SpeedPoint(_units(kind, [server] * ps + [worker] * workers), ps, workers, speed))
    enough, rising = PAYS * max(one.speed for one in points), list[SpeedPoint]()
    for point in sorted(points, key=lambda one: (one.units, -one.speed)):
        if point.speed > 0 and (not rising or (point.speed > rising[-1].speed and rising[-1].speed < enough)):
            rising.append(point)
    step = max(1, math.ceil(len(rising) / (POINTS - 1)))
    return (*rising[:-1:step], rising[-1]) if rising else ()
