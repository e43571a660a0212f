"""Measures a job whose nodes are planned, and makes its plans. What follows from them is decided in the core."""

from __future__ import annotations

import math

from dlrover_hooks.master.core.events import PlanMade, Sampled
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_scaling.node_monitor import NodeMonitor
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.master.scaling.job_resource_optimizer import JobResourceOptimizer, Situation


class JobManager:
    """Of one job.

    Its `resource_optimizer` makes plans and its `node_monitor` samples; both are returned as events, which the master
    journals. `WorkerManager` carries a plan out when its event is applied, and a `Scaler` starts and removes the nodes.

    Args:
        job: its name.
        resource_optimizer: called by the thread that calls `plan`.
    """

    def __init__(self, job: str, resource_optimizer: JobResourceOptimizer) -> None:
        self.job = job
        self.resource_optimizer = resource_optimizer
        self.node_monitor = NodeMonitor()
        self._content_until = -math.inf
        """The optimizer had no better plan: it is asked again after a cool-down."""

    def sample(self, known: Nodes, job: Job, scaling: JobScaling) -> Sampled | None:
        """What was measured since the last call; None: nothing that can be used. Call it once in each window."""
        sample = self.node_monitor.sample(known, job, scaling)
        return None if sample is None else Sampled(self.job, sample)

    def plan(self, found: Situation, now: float) -> PlanMade | None:
        """The plan that is due at `now`; None: none is. Any thread. Raises what the optimizer raises."""
        if now < self._content_until and not found.out_of_memory:
            return None
        asked = self.resource_optimizer.plans(found, now)
        made = self.resource_optimizer.plan(found, now) if asked else None
        if asked and made is None:
            self._content_until = now + found.history.pace.cool_down_s
        return made
