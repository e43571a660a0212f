"""Compares the speed after a plan with the speed before it, and rolls back a plan that made the job slower.

The rule is that of two windows: a plan is rolled back when the job lost more than 5 % of its speed in two windows in
succession, and kept when it did not in two in succession. A plan whose nodes do not all run in time is rolled back,
too. Pure: every function returns a new `PlanHistory`. `now` is in seconds, at least 0, and never goes back.
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from typing import NamedTuple

import msgspec

from dlrover_hooks.protocol import JobSample, NodeGroupResource, NodeResource, NodeType, ResourcePlan, ScalingPace

LOST = 0.05
"""A window counts as slower if the speed is below that of before by more than this share."""
WINDOWS = 2
"""Windows in succession that decide."""
MOST_WINDOWS = 6
"""After so many without two alike in succession, their median decides."""
RECENT = 5
"""Windows whose median is the speed before a plan."""
RECORDS = 64
"""Plans that the history keeps."""


_EMPTY = ResourcePlan()


class PlanOutcome(enum.Enum):
    STARTING = "starting"
    """Its nodes do not all run."""
    MEASURING = "measuring"
    KEPT = "kept"
    ROLLED_BACK = "rolled back"
    SUPERSEDED = "superseded"
    """Another plan had to be made before it was decided, as after a node that was killed for memory."""
    CARRIED_OUT = "carried out"
    """It is not compared: there was no speed before it, or it must not be taken back, as a user's plan."""


class NodeCount(msgspec.Struct, frozen=True):
    """How many nodes of a type have one size."""

    type: NodeType
    resource: NodeResource
    count: int


Composition = tuple[NodeCount, ...]
"""All nodes of a job, sorted, so that equal jobs are equal tuples."""


class PlanRecord(msgspec.Struct, frozen=True):
    """One plan, and what became of it. Speeds are in steps per second, times in the seconds that the caller gives."""

    number: int
    made_at: float
    plan: ResourcePlan
    reason: str
    predicted: float | None
    """By the model; None: the plan was made by a rule."""
    before: float | None = None
    """The median speed of the last windows before it."""
    restores: ResourcePlan = ResourcePlan()
    """The plan that takes it back. Nodes of one type that had different sizes all get the largest."""
    target: Composition = ()
    outcome: PlanOutcome = PlanOutcome.STARTING
    since: float = 0.0
    """When its nodes began to run all; while they do not, when the last of them was missing first."""
    speeds: tuple[float, ...] = ()
    """Of the windows after settling."""
    decided: str = ""
    """Why it was kept, rolled back or superseded."""

    @property
    def measured(self) -> float | None:
        """The median speed after it; None: there is no window yet."""
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def least(self) -> float:
        """A window below this speed counts as slower.

        A plan for fewer nodes may be predicted to lose a little. It is held to its prediction then.
        """
        known = [speed for speed in (self.before, self.predicted) if speed is not None]
        return (1 - LOST) * min(known, default=0.0)


class Barred(msgspec.Struct, frozen=True):
    """A job that was rolled back is not planned again before `until`."""

    target: Composition
    until: float
    times: int


class PlanHistory(msgspec.Struct, frozen=True):
    """The plans of a job, the oldest first, and what the next one is compared with."""

    pace: ScalingPace = ScalingPace()
    records: tuple[PlanRecord, ...] = ()
    made: int = 0
    nodes: Composition = ()
    """Of the newest sample."""
    speeds: tuple[float, ...] = ()
    """Of the last windows with these nodes."""
    quiet_until: float = 0.0
    barred: tuple[Barred, ...] = ()

    @property
    def open(self) -> PlanRecord | None:
        """The plan that is not decided yet."""
        last = self.records[-1] if self.records else None
        return last if last and last.outcome in (PlanOutcome.STARTING, PlanOutcome.MEASURING) else None


class Verified(NamedTuple):
    """What a sample led to. `rollback` is empty unless a plan must be taken back now."""

    history: PlanHistory
    rollback: ResourcePlan


def at_pace(history: PlanHistory, pace: ScalingPace) -> PlanHistory:
    """The history from now on with another pace. A plan that is not decided yet is not compared any more: its nodes
    have ended with the launcher that owned them."""
    records = history.records
    if history.open is not None:
        last = msgspec.structs.replace(
            records[-1], outcome=PlanOutcome.SUPERSEDED, decided="the job was launched again before it was verified"
        )
        records = (*records[:-1], last)
    return msgspec.structs.replace(history, pace=pace, records=records, nodes=(), speeds=())


def refusal(history: PlanHistory, plan: ResourcePlan, sample: JobSample, now: float) -> str:
    """Why this plan may not be made now; empty: it may. `sample` is the newest one."""
    if why := waits(history, sample, now):
        return why
    target = _target(plan, sample)
    if target == history.nodes:
        return "it changes nothing"
    for one in history.barred:
        if one.target == target and now < one.until:
            return f"this plan was rolled back; it may be tried again in {one.until - now:.0f} s"
    return ""


def waits(history: PlanHistory, sample: JobSample, now: float) -> str:
    """Why no plan at all may be made now that is compared with the speed before it; empty: one may."""
    if (last := history.open) is not None:
        return f"plan {last.number} is not verified yet"
    if now < history.quiet_until:
        return f"the last plan was decided less than {history.pace.cool_down_s:g} s ago"
    if len(history.speeds) < WINDOWS or history.nodes != composition(sample):
        return f"the speed of the job as it is was not measured in {WINDOWS} windows yet"
    return ""


def made(
    history: PlanHistory, plan: ResourcePlan, sample: JobSample, now: float, *, reason: str, predicted: float | None
) -> PlanHistory:
    """The plan is carried out from now on. Call `refusal` first."""
    number = history.made + 1
    record = PlanRecord(
        number, now, plan, reason, predicted, statistics.median(history.speeds), _restoring(plan, sample),
        _target(plan, sample), since=now,
    )  # fmt: skip
    return msgspec.structs.replace(history, records=(*history.records, record)[-RECORDS:], made=number)


def carried_out(
    history: PlanHistory, plan: ResourcePlan, now: float, reason: str, before: ResourcePlan = _EMPTY
) -> PlanHistory:
    """A plan that is not compared is carried out now. It supersedes one that is not decided yet, and what was measured
    before it says nothing about the next one.

    `before`: what the job had, as a plan, for people.
    """
    history = superseded(history, f"superseded: {reason}", now)
    number = history.made + 1
    record = PlanRecord(
        number, now, plan, reason, None, restores=before, outcome=PlanOutcome.CARRIED_OUT, since=now
    )  # fmt: skip
    records = (*history.records, record)[-RECORDS:]
    return msgspec.structs.replace(history, records=records, made=number, nodes=(), speeds=())


def superseded(history: PlanHistory, why: str, now: float) -> PlanHistory:
    """A plan that cannot wait is carried out now. One that is not decided yet is neither kept nor rolled back."""
    record = history.open
    return history if record is None else _decided(history, record, PlanOutcome.SUPERSEDED, why, now)


def observed(history: PlanHistory, sample: JobSample, now: float) -> Verified:
    """A window was measured. With a `rollback`, the caller carries out that plan; it is not verified itself."""
    nodes = composition(sample)
    speeds = (*(history.speeds if nodes == history.nodes else ()), sample.speed)[-RECENT:]
    history = msgspec.structs.replace(history, nodes=nodes, speeds=speeds)
    record = history.open
    if record is None:
        return Verified(history, ResourcePlan())
    if nodes != record.target:
        return _starting(history, record, now)
    if record.outcome is PlanOutcome.STARTING:
        record = msgspec.structs.replace(record, outcome=PlanOutcome.MEASURING, since=now)
    elif now >= record.since + history.pace.settle_s:
        record = msgspec.structs.replace(record, speeds=(*record.speeds, sample.speed))
    slower = _slower(record)
    if slower is None:
        return Verified(_with(history, record), ResourcePlan())
    why = (
        f"{record.before or 0.0:.3g} steps/s before it, {record.measured:.3g} in {len(record.speeds)} windows after it"
    )
    if slower:
        return _rolled_back(history, record, why, now)
    return Verified(_decided(history, record, PlanOutcome.KEPT, why, now), ResourcePlan())


def not_started(history: PlanHistory, now: float) -> Verified:
    """A node did not start in time: the plan that asked for it is rolled back. Without a plan nothing changes."""
    record = history.open
    if record is None or record.outcome is not PlanOutcome.STARTING:
        return Verified(history, ResourcePlan())
    return _starting(history, record, now)


def composition(sample: JobSample) -> Composition:
    """The nodes of a sample."""
    return _sorted(Counter((node.type, node.config_resource) for node in sample.nodes))


def _sorted(counts: Counter[tuple[NodeType, NodeResource]]) -> Composition:
    found = (NodeCount(kind, size, count) for (kind, size), count in counts.items() if count)
    return tuple(sorted(found, key=lambda one: (one.type.value, msgspec.structs.astuple(one.resource))))


def _target(plan: ResourcePlan, sample: JobSample) -> Composition:
    counts: Counter[tuple[NodeType, NodeResource]] = Counter()
    for node in sample.nodes:
        if node.type.value not in plan.node_group_resources:
            counts[node.type, plan.node_resources.get(node.name, node.config_resource)] += 1
    for name, group in plan.node_group_resources.items():
        counts[NodeType(name), group.node_resource] += group.count
    return _sorted(counts)


def _restoring(plan: ResourcePlan, sample: JobSample) -> ResourcePlan:
    changed = {NodeType(name) for name in plan.node_group_resources}
    changed |= {node.type for node in sample.nodes if node.name in plan.node_resources}
    kinds = sorted(changed, key=lambda one: one.value)
    return ResourcePlan({kind.value: NodeGroupResource(len(sample.of(kind)), sample.largest(kind)) for kind in kinds})


def _starting(history: PlanHistory, record: PlanRecord, now: float) -> Verified:
    """Not all nodes of the plan run, or not any more. What was measured before says nothing about what follows."""
    if record.outcome is PlanOutcome.MEASURING:
        record = msgspec.structs.replace(record, outcome=PlanOutcome.STARTING, since=now, speeds=())
    if now < record.since + history.pace.start_s:
        return Verified(_with(history, record), ResourcePlan())
    return _rolled_back(history, record, f"its nodes did not all run within {history.pace.start_s:g} s", now)


def _slower(record: PlanRecord) -> bool | None:
    """Whether the plan made the job slower; None: that is not known yet."""
    flags = {speed < record.least for speed in record.speeds[-WINDOWS:]}
    if len(record.speeds) >= WINDOWS and len(flags) == 1:
        return flags.pop()
    if len(record.speeds) >= MOST_WINDOWS:
        return statistics.median(record.speeds) < record.least
    return None


def _rolled_back(history: PlanHistory, record: PlanRecord, why: str, now: float) -> Verified:
    times = 1 + max((one.times for one in history.barred if one.target == record.target), default=0)
    others = tuple(one for one in history.barred if one.target != record.target)
    barred = (*others, Barred(record.target, now + history.pace.barred_s * 2 ** (times - 1), times))[-RECORDS:]
    history = msgspec.structs.replace(history, barred=barred)
    return Verified(_decided(history, record, PlanOutcome.ROLLED_BACK, why, now), record.restores)


def _decided(history: PlanHistory, record: PlanRecord, outcome: PlanOutcome, why: str, now: float) -> PlanHistory:
    record = msgspec.structs.replace(record, outcome=outcome, decided=why)
    return msgspec.structs.replace(_with(history, record), quiet_until=now + history.pace.cool_down_s)


def _with(history: PlanHistory, record: PlanRecord) -> PlanHistory:
    return msgspec.structs.replace(history, records=(*history.records[:-1], record))


def described(record: PlanRecord) -> str:
    """The change that a plan makes, such as `worker 1 -> 2`."""
    parts: list[str] = []
    for name, group in sorted(record.plan.node_group_resources.items()):
        before = record.restores.node_group_resources.get(name)
        count = f"{before.count} -> {group.count}" if before is not None else f"{group.count}"
        size = group.node_resource
        same = before is not None and before.node_resource == size
        parts.append(f"{name} {count}" if same or size == NodeResource() else f"{name} {count}, {_size(size)} each")
    parts += [f"{name}: {_size(size)}" for name, size in sorted(record.plan.node_resources.items())]
    return "; ".join(parts)


def _size(resource: NodeResource) -> str:
    parts = [f"{resource.cpu:g} core{'s' * (resource.cpu != 1)}"] if resource.cpu else []
    parts += [f"{resource.memory} MiB"] if resource.memory else []
    parts += [f"{resource.gpu_num} {resource.gpu_type or 'GPU'}"] if resource.gpu_num else []
    return ", ".join(parts) or "any size"
