"""Asks an optimizer for the plan that is due, by the stage that the job is in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dlrover_hooks.master.core.events import PlanMade
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_scaling import plan_requests, plan_verification
from dlrover_hooks.master.core.job_scaling.job_statistics import JobStatistics
from dlrover_hooks.master.core.job_scaling.plan_verification import WINDOWS, PlanHistory
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.master.scaling.optimizer import ResourceOptimizer
from dlrover_hooks.protocol import Node, NodeType, OptimizeStage, ResourceLimits, ResourcePlan, ScalingMode

AFTER = {
    OptimizeStage.CREATE: OptimizeStage.WORKER_INITIAL,
    OptimizeStage.WORKER_INITIAL: OptimizeStage.PS_INITIAL,
    OptimizeStage.PS_INITIAL: OptimizeStage.RUNNING,
    OptimizeStage.RUNNING: OptimizeStage.RUNNING,
}
_WHY = {
    OptimizeStage.CREATE: "the first nodes of the job",
    OptimizeStage.WORKER_INITIAL: "the size of the workers, by what the first ones use",
    OptimizeStage.PS_INITIAL: "the parameter servers that the workers need",
}


class Situation(msgspec.Struct, frozen=True):
    """What a plan depends on: a copy of the job's state that another thread may read.

    `ps`: it has parameter servers. `has`: its nodes, as a plan.
    """

    job: str
    ps: bool
    has: ResourcePlan
    mode: ScalingMode
    held: bool
    finished: bool
    stage: OptimizeStage
    limits: ResourceLimits
    statistics: JobStatistics
    history: PlanHistory
    out_of_memory: tuple[Node, ...]
    user: str = ""
    script_hash: str = ""


def situation(job: Job, scaling: JobScaling, now: float) -> Situation:
    """Of this job, at `now`."""
    killed = scaling.out_of_memory if job.ps is None else job.ps.out_of_memory
    present = plan_requests.has(job, scaling, now)
    return Situation(
        job.name, job.ps is not None, present, scaling.mode, scaling.held, scaling.finished, scaling.stage,
        scaling.limits, scaling.statistics, scaling.history, killed, scaling.user, scaling.script_hash,
    )  # fmt: skip


class JobResourceOptimizer:
    """Splits the planning of a job into the stages CREATE, WORKER_INITIAL, PS_INITIAL and RUNNING.

    Args:
        optimizer: gives the optimizer for a situation.
    """

    def __init__(self, optimizer: Callable[[Situation], ResourceOptimizer]) -> None:
        self._optimizer = optimizer

    def plans(self, found: Situation, now: float) -> bool:
        """Whether the optimizer is to be asked for a plan at `now`."""
        if found.finished:
            return False
        if found.stage is OptimizeStage.CREATE or found.out_of_memory:
            return True
        if found.held or found.mode is ScalingMode.MANUAL or not found.statistics.recent:
            return False
        if found.stage is not OptimizeStage.RUNNING:
            return len(found.statistics.recent) >= WINDOWS
        return not plan_verification.waits(found.history, found.statistics.recent[-1], now)

    def plan(self, found: Situation, now: float) -> PlanMade | None:
        """The plan for a job to which `plans` applies; None: it stays as it is. Raises what the optimizer raises."""
        if found.stage is not OptimizeStage.CREATE and found.out_of_memory:
            return self._after_out_of_memory(found)
        return self._running(found, now) if found.stage is OptimizeStage.RUNNING else self._of_stage(found)

    def _of_stage(self, found: Situation) -> PlanMade:
        optimizer = self._optimizer(found)
        plan = optimizer.generate_opt_plan(found.stage)
        why = optimizer.explain(plan) or _WHY[found.stage]
        return PlanMade(found.job, plan, AFTER[found.stage], why, verified=False)

    def _after_out_of_memory(self, found: Situation) -> PlanMade:
        nodes = found.out_of_memory
        plan = self._optimizer(found).generate_oom_recovery_plan(nodes, found.stage)
        names = ", ".join(node.name for node in nodes[:4])
        why = f"{names} used up the memory"
        return PlanMade(found.job, plan, found.stage, why, verified=False, answers_out_of_memory=True)

    def _running(self, found: Situation, now: float) -> PlanMade | None:
        optimizer = self._optimizer(found)
        plan = optimizer.generate_opt_plan(found.stage)
        if plan.empty or plan_verification.refusal(found.history, plan, found.statistics.recent[-1], now):
            return None
        predicted = optimizer.predict(plan)
        why = optimizer.explain(plan) or _why(plan, predicted)
        return PlanMade(found.job, plan, found.stage, why, predicted)


def _why(plan: ResourcePlan, predicted: float | None) -> str:
    if plan.node_resources:
        return f"{', '.join(sorted(plan.node_resources)[:4])}: more cores for parameter servers that use all they have"
    if predicted is not None:
        return "the smallest job with 95 % of the best speed that the model predicts"
    counts = ", ".join(
        f"{group.count} {'servers' if name == NodeType.PS.value else 'workers'}"
        for name, group in sorted(plan.node_group_resources.items())
    )
    return f"to measure the speed with {counts}"
