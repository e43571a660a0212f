"""Evaluates an algorithm on recorded jobs: what it would have planned, against what really happened.

At each change of a job's nodes, and at its end, the algorithm gets what was known then: the samples until that moment,
and jobs that had finished before the job began. What the planned nodes really brought is known where the job had them
at another time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.brain.algorithm_executor import AlgorithmExecutor, check_name
from dlrover_hooks.master.brain.database import jobs
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.tables import job
from dlrover_hooks.master.brain.messages import RegisterJob
from dlrover_hooks.master.brain.records import AlgorithmInput, JobRecord, PastJob, Proposal
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import JobSample, Message, NodeType

Nodes = tuple[int, int]
"""(servers, workers)."""


class ReplayedPlan(Message, frozen=True):
    """One decision. Speeds in steps per second; None: not predicted, not measured.

    `after`: samples until then. `real`: the nodes that the job had then; `next`: those that it had afterwards, None at
    the end. `planned`: by the algorithm, None if it had no plan or failed (`error`). `planned_speed`: what was measured
    of the planned nodes at any time.
    """

    job: str
    after: int
    real: Nodes
    real_speed: float
    next: Nodes | None = None
    next_speed: float | None = None
    planned: Nodes | None = None
    planned_speed: float | None = None
    predicted: float | None = None
    reason: str = ""
    error: str = ""


class RecordedJob(Message, frozen=True):
    """A job of the database with all its samples, and the finished jobs that were like it when it began."""

    registration: RegisterJob
    samples: tuple[JobSample, ...]
    history: tuple[PastJob, ...]


def recorded(database: Database, names: Sequence[str]) -> Iterator[RecordedJob]:
    """The jobs with these names, or all, the oldest first. Raises `UsageError` for a name that no job has."""
    with database.reading() as connection:
        query = sa.select(job.c.id, job.c.name, job.c.registration, job.c.registered_at).order_by(job.c.id)
        found = connection.execute(query.where(job.c.name.in_(names)) if names else query).all()
    if unknown := sorted(set(names) - {row.name for row in found}):
        raise UsageError(
            f"the database {database.name} has no job {unknown[0]!r}", hint="see brain replay without --job"
        )
    for row in found:
        registration = msgspec.convert(row.registration, RegisterJob)
        with database.reading() as connection:
            samples = jobs.all_samples(connection, row.id)
            past = jobs.history(connection, registration, before=row.registered_at)
        yield RecordedJob(registration, tuple(samples), past)


def replay(
    recording: RecordedJob, algorithm: str, config: Mapping[str, Any], executor: AlgorithmExecutor
) -> list[ReplayedPlan]:
    """The decisions of the algorithm for one job. Raises `UsageError` if there is no such algorithm."""
    check_name(algorithm)
    samples = [sample for sample in recording.samples if sample.of(NodeType.WORKER)]
    speeds = _speeds(samples)
    ends = [n for n in range(1, len(samples) + 1) if n == len(samples) or _nodes(samples[n]) != _nodes(samples[n - 1])]
    return [_decision(recording, samples, end, speeds, algorithm, config, executor) for end in ends]


def _decision(
    recording: RecordedJob, samples: Sequence[JobSample], end: int, speeds: Mapping[Nodes, float], algorithm: str,
    config: Mapping[str, Any], executor: AlgorithmExecutor,
) -> ReplayedPlan:  # fmt: skip
    known, real = _newest_of_each(samples[:end]), _nodes(samples[end - 1])
    record = JobRecord(recording.registration, OptimizeStage.RUNNING, known)
    executed = executor.execute(algorithm, AlgorithmInput(record, recording.history, config=dict(config)))
    following = _nodes(samples[end]) if end < len(samples) else None
    planned = _planned(executed.proposal, samples[end - 1])
    proposal = executed.proposal
    return ReplayedPlan(
        recording.registration.job, end, real, speeds[real], following,
        speeds[following] if following else None, planned, speeds.get(planned) if planned else None,
        proposal.predicted if proposal else None, proposal.reason if proposal else "", executed.error,
    )  # fmt: skip


def _newest_of_each(samples: Sequence[JobSample]) -> tuple[JobSample, ...]:
    """What the Brain gives an algorithm, see `jobs.record`."""
    left: dict[Nodes, int] = {}
    found: list[JobSample] = []
    for sample in reversed(samples[-jobs.NEWEST :]):
        count = left.get(_nodes(sample), 0)
        if count < jobs.EACH:
            found.append(sample)
        left[_nodes(sample)] = count + 1
    return tuple(reversed(found))


def _speeds(samples: Sequence[JobSample]) -> dict[Nodes, float]:
    """The median of each configuration."""
    measured: dict[Nodes, list[float]] = {}
    for sample in samples:
        measured.setdefault(_nodes(sample), []).append(sample.speed)
    return {nodes: statistics.median(speeds) for nodes, speeds in measured.items()}


def _nodes(sample: JobSample) -> Nodes:
    return len(sample.of(NodeType.PS)), len(sample.of(NodeType.WORKER))


def _planned(proposal: Proposal | None, sample: JobSample) -> Nodes | None:
    if proposal is None:
        return None
    groups = proposal.plan.node_group_resources
    ps, workers = (
        groups[kind.value].count if kind.value in groups else len(sample.of(kind))
        for kind in (NodeType.PS, NodeType.WORKER)
    )
    return ps, workers


def table(plans: Sequence[ReplayedPlan]) -> str:
    """The decisions as a table for people."""
    lines = [
        ("job", "samples", "real", "speed", "next", "speed", "planned", "measured", "predicted", "reason"),
        *((one.job, str(one.after), _text(one.real), _number(one.real_speed), _text(one.next), _number(one.next_speed),
           _text(one.planned), _number(one.planned_speed), _number(one.predicted), one.error or one.reason)
          for one in plans),
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(9)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def summary(plans: Sequence[ReplayedPlan]) -> str:
    """How far the predictions were from what was measured, where both are known."""
    known = [(one.predicted, one.planned_speed) for one in plans if one.predicted and one.planned_speed]
    errors = [abs(predicted - measured) / measured for predicted, measured in known]
    failed = sum(bool(one.error) for one in plans)
    error = f"; median error of the predictions {statistics.median(errors):.1%} ({len(errors)} known)" if errors else ""
    return f"{len(plans)} decisions, {failed} failed{error}"


def _text(nodes: Nodes | None) -> str:
    if nodes is None:
        return "-"
    return f"{nodes[0]} ps + {nodes[1]}" if nodes[0] else str(nodes[1])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
