"""Which algorithm answers which problem."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from dlrover_hooks.master.brain.algorithms.creation import first_plan, plan_from_history
from dlrover_hooks.master.brain.algorithms.parameter_servers import (
    RECENT,
    idle_ps,
    insufficient_ps,
    ps_initial,
    unbalanced,
    unbalanced_ps,
)
from dlrover_hooks.master.brain.algorithms.running import fitted_model, running
from dlrover_hooks.master.brain.algorithms.workers import oom_worker, workers_initial
from dlrover_hooks.master.brain.database.events import EventKind
from dlrover_hooks.master.brain.records import Algorithm, JobRecord
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.protocol import NodeType


class PlanProblem(enum.Enum):
    """What is wrong with a job, or what is due."""

    CREATION = "creation"
    WORKERS_INITIAL = "workers_initial"
    PS_INITIAL = "ps_initial"
    OOM_WORKER = "oom_worker"
    UNBALANCED_PS = "unbalanced_ps"
    INSUFFICIENT_PS = "insufficient_ps"
    IDLE_PS = "idle_ps"
    MODEL = "model"
    RUNNING = "running"


BUILT_IN: Mapping[str, Algorithm] = MappingProxyType(
    {
        "first_plan": first_plan,
        "plan_from_history": plan_from_history,
        "workers_initial": workers_initial,
        "ps_initial": ps_initial,
        "oom_worker": oom_worker,
        "unbalanced_ps": unbalanced_ps,
        "insufficient_ps": insufficient_ps,
        "idle_ps": idle_ps,
        "fitted_model": fitted_model,
        "running": running,
    }
)
DEFAULTS: Mapping[PlanProblem, tuple[str, ...]] = MappingProxyType(
    {
        PlanProblem.CREATION: ("plan_from_history", "first_plan"),
        PlanProblem.WORKERS_INITIAL: ("workers_initial",),
        PlanProblem.PS_INITIAL: ("ps_initial",),
        PlanProblem.OOM_WORKER: ("oom_worker",),
        PlanProblem.UNBALANCED_PS: ("unbalanced_ps", "insufficient_ps"),
        PlanProblem.INSUFFICIENT_PS: ("insufficient_ps",),
        PlanProblem.IDLE_PS: ("idle_ps",),
        PlanProblem.MODEL: ("fitted_model",),
        PlanProblem.RUNNING: ("running",),
    }
)
"""The first that has an answer is taken."""
_OF_KIND = MappingProxyType(
    {
        EventKind.INIT: PlanProblem.CREATION,
        EventKind.WORKER_INITIAL: PlanProblem.WORKERS_INITIAL,
        EventKind.PS_INITIAL: PlanProblem.PS_INITIAL,
        EventKind.LOW_USE: PlanProblem.IDLE_PS,
        EventKind.MODEL: PlanProblem.MODEL,
    }
)


def problem(kind: EventKind, job: JobRecord) -> PlanProblem:
    """What is wrong with a job for which such an event was created."""
    samples = job.recent(RECENT)
    if kind is EventKind.OUT_OF_MEMORY:
        servers = [node for node in job.oom_nodes if node.type is NodeType.PS]
        if not servers:
            return PlanProblem.OOM_WORKER
        present = samples[-1].of(NodeType.PS) if samples else []
        few = rules.needs_servers(servers, present)
        return PlanProblem.INSUFFICIENT_PS if few else PlanProblem.UNBALANCED_PS
    if kind is EventKind.HOT_PS:
        skewed = unbalanced(samples, lambda node: node.cpu)
        return PlanProblem.UNBALANCED_PS if skewed else PlanProblem.INSUFFICIENT_PS
    return _OF_KIND.get(kind, PlanProblem.RUNNING)
