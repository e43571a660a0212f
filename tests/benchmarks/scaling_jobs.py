"""Synthetic jobs: what their speed really is, and what is measured of it."""

from __future__ import annotations

import numpy as np

from dlrover_hooks.master.scaling import (
    JobSample,
    LocalOptimizer,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeType,
    OptimizeStage,
    ResourceLimits,
)
from dlrover_hooks.master.scaling.speed_models import PsSpeedModel

NODES, MAX_PS = 32, 8
SIZE = NodeResource(cpu=1, memory=1024)


def ps_job(seed: int) -> PsSpeedModel:
    """Asynchronous training with parameter servers."""
    random = np.random.default_rng(seed)
    low, high = (0.05, 0.005, 0.0, 0.0), (0.2, 0.05, 0.002, 0.01)
    a, b, c, d = (float(random.uniform(*bounds)) for bounds in zip(low, high, strict=True))
    return PsSpeedModel((a, b, c, d))


def sample(ps: int, workers: int, speed: float) -> JobSample:
    """Of a job whose nodes have one core and use half of it."""
    kinds = [(NodeType.PS, number) for number in range(ps)] + [(NodeType.WORKER, number) for number in range(workers)]
    return JobSample(speed, tuple(NodeSample(f"{kind.value}-{n}", kind, SIZE, 0.5, 512) for kind, n in kinds))


def scaled(truth: PsSpeedModel, seed: int, noise: float, windows: int = 24) -> tuple[float, int]:
    """Percent of the best speed that a job loses which is scaled from 1 + 1 nodes, and the number of plans."""
    random = np.random.default_rng([seed, 1])
    optimizer = LocalOptimizer(ResourceLimits(NODES, NODES * 1024, max_workers=NODES, max_ps=MAX_PS), ps=True)
    sizes, plans = {"ps": 1, "worker": 1}, 0
    for _ in range(windows):
        seen = float(truth.speed(sizes["ps"], sizes["worker"])) * (1 + noise * random.standard_normal())
        optimizer.observe(sample(sizes["ps"], sizes["worker"], max(seen, 1e-3)))
        groups: dict[str, NodeGroupResource] = optimizer.generate_opt_plan(OptimizeStage.RUNNING).node_group_resources
        sizes |= {name: group.count for name, group in groups.items()}
        plans += bool(groups)
    best = max(float(truth.speed(ps, workers)) for ps in range(1, MAX_PS + 1) for workers in range(1, NODES - ps + 1))
    return 100 * (1 - float(truth.speed(sizes["ps"], sizes["worker"])) / best), plans
