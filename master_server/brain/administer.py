"""The administer of a job: decides when the job needs a new plan, during its whole life.

Pure. Its state is the job's rows, so that any process can act for any job. The constants that name no source are our
choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from dlrover_hooks.master.brain.database.events import EventKind, NewEvent
from dlrover_hooks.master.brain.messages import AskPlan
from dlrover_hooks.master.brain.records import JobRecord
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.master.scaling.rules import HOT
from dlrover_hooks.protocol import JobSample, NodeType

LOOK_EVERY_S = 15.0
"""Between two looks at a job, as long as the windows of its samples are."""
WINDOWS = 3
"""Samples that must agree; the comparison window of DLRover's Brain."""
SLOW = 0.2
"""A job is slow if it lost more than this share of the best speed that it had with the same nodes; DLRover's
`speed less`."""
IDLE = 0.4
"""Servers that all use less than this share of their cores have too many."""
PERIOD_S = 180.0
"""A job that runs is planned again so long after the last time."""
COOL_DOWN_S = 300.0
"""The same issue makes no second event within this time: a plan needs it to start, settle and be measured."""
LOW_USE_AFTER_S = 3600.0
"""Between two looks for servers with too many cores. Taking cores away is never urgent."""
_STAGE_OF_KIND = {
    OptimizeStage.CREATE: EventKind.INIT,
    OptimizeStage.WORKER_INITIAL: EventKind.WORKER_INITIAL,
    OptimizeStage.PS_INITIAL: EventKind.PS_INITIAL,
    OptimizeStage.RUNNING: EventKind.PERIODIC,
}


def created() -> NewEvent:
    """The job begins."""
    return NewEvent(EventKind.INIT, OptimizeStage.CREATE, "the job begins")


def asked(message: AskPlan) -> NewEvent:
    """The job's master asks for a plan."""
    if message.oom_nodes:
        names = ", ".join(node.name for node in message.oom_nodes[:5])
        reason = f"killed for memory: {names}"
        return NewEvent(EventKind.OUT_OF_MEMORY, message.stage, reason, message.oom_nodes, message.config)
    kind = EventKind.MODEL if message.model_only else _STAGE_OF_KIND[message.stage]
    return NewEvent(kind, message.stage, f"the master asks for {message.stage.name}", config=message.config)


def looked(job: JobRecord, last: Mapping[EventKind, float], now: float) -> list[NewEvent]:
    """The events that are due after the newest samples. `last`: when the newest event of each kind was created."""
    samples = job.recent(WINDOWS)
    if len(samples) < WINDOWS:
        return []
    if (stage := _due_stage(job, last)) is not None:
        return [stage]
    found = [
        event
        for event, quiet_s in ((_hot(samples), COOL_DOWN_S), (_slow(job, samples), COOL_DOWN_S),
                               (_low_use(samples), LOW_USE_AFTER_S))
        if event is not None and now >= last.get(event.kind, -quiet_s) + quiet_s
    ]  # fmt: skip
    newest = max(last.values(), default=0.0)
    if not found and now >= newest + PERIOD_S:
        found.append(NewEvent(EventKind.PERIODIC, OptimizeStage.RUNNING, f"{PERIOD_S:.0f} s after the last event"))
    return found


def _due_stage(job: JobRecord, last: Mapping[EventKind, float]) -> NewEvent | None:
    """The stages that follow the creation come once, as soon as there are samples; then the job is RUNNING."""
    ran = {EventKind.PERIODIC, EventKind.HOT_PS, EventKind.SLOW} & set(last)
    if EventKind.WORKER_INITIAL not in last and not ran:
        return NewEvent(EventKind.WORKER_INITIAL, OptimizeStage.WORKER_INITIAL, f"{WINDOWS} samples of its workers")
    if job.registration.ps and EventKind.PS_INITIAL not in last and not ran:
        return NewEvent(EventKind.PS_INITIAL, OptimizeStage.PS_INITIAL, f"{WINDOWS} samples of its servers")
    return None


def _hot(samples: Sequence[JobSample]) -> NewEvent | None:
    shares = [{node.name: node.cpu_share for node in sample.of(NodeType.PS)} for sample in samples]
    hot = sorted(name for name in shares[-1] if all(share.get(name, 0.0) >= HOT for share in shares))
    if not hot:
        return None
    reason = f"{hot[0]} used {shares[-1][hot[0]]:.0%} of its cores in {len(samples)} samples"
    return NewEvent(EventKind.HOT_PS, OptimizeStage.RUNNING, reason)


def _slow(job: JobRecord, samples: Sequence[JobSample]) -> NewEvent | None:
    """Against the best sample of the same nodes. A job that stands still is its master's affair."""
    now = statistics.median(sample.speed for sample in samples)
    best = max((one.speed for one in job.samples if _alike(one, samples[-1])), default=0.0)
    if not 0 < now < (1 - SLOW) * best:
        return None
    return NewEvent(EventKind.SLOW, OptimizeStage.RUNNING, f"{now:.3g} steps/s, with the same nodes it had {best:.3g}")


def _alike(one: JobSample, other: JobSample) -> bool:
    return {(node.name, node.config_resource) for node in one.nodes} == {
        (node.name, node.config_resource) for node in other.nodes
    }


def _low_use(samples: Sequence[JobSample]) -> NewEvent | None:
    shares = [node.cpu_share for sample in samples for node in sample.of(NodeType.PS)]
    if not shares or not all(0 < share < IDLE for share in shares):
        return None
    return NewEvent(EventKind.LOW_USE, OptimizeStage.RUNNING, f"no server used over {max(shares):.0%} of its cores")
