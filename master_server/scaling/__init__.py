"""Which resources jobs should have: plans, the models of their speed, the optimizer of a single job, the allocation.

Pure: no clock, I/O or threads. Nothing starts or stops nodes here. scipy (extra `scaling`) is imported at the first
fit of a model. Entry point: `LocalOptimizer`. `plan_verification` decides whether a plan is kept, `allocation` divides
a cluster among jobs.
"""

from dlrover_hooks.master.scaling.local_optimizer import LocalOptimizer
from dlrover_hooks.master.scaling.optimizer import OptimizeStage, ResourceOptimizer
from dlrover_hooks.protocol import (
    JobSample,
    Node,
    NodeGroupResource,
    NodeResource,
    NodeSample,
    NodeStatus,
    NodeType,
    ResourceLimits,
    ResourcePlan,
    ScalePlan,
)

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
