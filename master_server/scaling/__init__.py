"""Which resources jobs should have: the manager of a job, its optimizer, the models of its speed, the allocation.

Pure: no clock, I/O or threads. Nothing starts or stops nodes here. numpy, and scipy (extra `scaling`) at the first fit
of a model, are imported with the `LocalOptimizer`, not before. Entry point: `job_manager.JobManager`. `allocation`
divides a cluster among jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlrover_hooks.master.scaling.optimizer import ResourceOptimizer
from dlrover_hooks.protocol import (
    JobSample,
    Node,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeStatus,
    NodeType,
    OptimizeStage,
    ResourceLimits,
    ResourcePlan,
    ScalePlan,
)

if TYPE_CHECKING:
    from dlrover_hooks.master.scaling.local_optimizer import LocalOptimizer

__all__ = [
    "JobSample",
    "LocalOptimizer",
    "Node",
    "NodeGroupResource",
    "NodeResource",
    "NodeSample",
    "NodeStatus",
    "NodeType",
    "OptimizeStage",
    "ResourceLimits",
    "ResourceOptimizer",
    "ResourcePlan",
    "ScalePlan",
]


def __getattr__(name: str) -> Any:
    if name == "LocalOptimizer":
        from dlrover_hooks.master.scaling.local_optimizer import LocalOptimizer

        return LocalOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
