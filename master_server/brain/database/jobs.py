"""Statements on jobs and their samples. Each takes a connection in a transaction of its caller's."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from dlrover_hooks.errors import UnknownJob
from dlrover_hooks.master.brain.database.tables import cluster_sample, job, job_sample, resource_plan
from dlrover_hooks.master.brain.messages import RegisterJob, TimedSample
from dlrover_hooks.master.brain.records import ActiveJob, ClusterView, JobRecord, NodeUsage, PastJob, SpeedPoint
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import JobSample, Node, NodeSample, NodeType

NEWEST = 5000
"""Samples of a job among which those of each configuration are searched."""
EACH = 5
"""Samples of each configuration that an algorithm gets."""
USAGE_SAMPLES = 500
"""Samples of a finished job from which its usage is computed."""
PAST_JOBS = 20
"""Finished jobs like a new one that an algorithm gets."""
FRESH_S = 600.0
"""A sample of the cluster, or of a job that runs, older than this says nothing of now."""


class JobRow(NamedTuple):
    """The columns of a job that the Brain decides by."""

    id: int
    registration: RegisterJob
    registered_at: float
    sampled_at: float | None
    look_at: float


_COLUMNS = (job.c.id, job.c.registration, job.c.registered_at, job.c.sampled_at, job.c.look_at)


def register(connection: sa.Connection, registration: RegisterJob, now: float) -> tuple[JobRow, bool]:
    """The row of the job that runs under this name, made if there is none. The second value: it was made."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    columns = {
        "owner": registration.user, "script_hash": registration.script_hash, "model_size": registration.model_size,
        "registration": registration,
    }  # fmt: skip
    new = insert(job).values(name=registration.job, registered_at=now, look_at=now, **columns)
    made = connection.execute(new.on_conflict_do_nothing().returning(job.c.id)).first()
    if made is None:
        running = (job.c.name == registration.job) & job.c.ended_at.is_(None)
        connection.execute(sa.update(job).where(running).values(**columns))
    return find(connection, registration.job), made is not None


def find(connection: sa.Connection, name: str, *, lock: bool = False) -> JobRow:
    """The job that runs under this name. `lock`: no other transaction changes its row until this one ends.

    Raises `UnknownJob`.
    """
    query = sa.select(*_COLUMNS).where(job.c.name == name, job.c.ended_at.is_(None))
    row = connection.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise UnknownJob(f"The Brain has no job {name!r} that runs.", hint="Register the job first.")
    return _job_row(row)


def by_id(connection: sa.Connection, job_id: int) -> JobRow | None:
    """The job with this number; None: it has ended."""
    row = connection.execute(sa.select(*_COLUMNS).where(job.c.id == job_id, job.c.ended_at.is_(None))).first()
    return None if row is None else _job_row(row)


def add_samples(connection: sa.Connection, name: str, samples: Sequence[TimedSample], now: float) -> None:
    """Raises `UnknownJob`."""
    job_id = connection.execute(
        sa.select(job.c.id).where(job.c.name == name, job.c.ended_at.is_(None))
    ).scalar_one_or_none()
    if job_id is None:
        find(connection, name)
    if not samples:
        return
    rows = [
        {"job_id": job_id, "at": one.at, "speed": one.sample.speed, "nodes": one.sample.nodes,
         "ps": len(one.sample.of(NodeType.PS)), "workers": len(one.sample.of(NodeType.WORKER))}
        for one in samples
    ]  # fmt: skip
    connection.execute(sa.insert(job_sample), rows)
    connection.execute(sa.update(job).where(job.c.id == job_id).values(sampled_at=now))


def record(
    connection: sa.Connection, row: JobRow, stage: OptimizeStage, now: float, oom_nodes: Sequence[Node] = ()
) -> tuple[JobRecord, int | None]:
    """What an algorithm is told of the job, and the number of its newest sample."""
    newest = (
        sa.select(job_sample).where(job_sample.c.job_id == row.id).order_by(job_sample.c.id.desc()).limit(NEWEST)
    ).subquery()
    place = sa.func.row_number().over(partition_by=[newest.c.ps, newest.c.workers], order_by=newest.c.id.desc())
    ranked = sa.select(newest, place.label("place")).subquery()
    rows = connection.execute(sa.select(ranked).where(ranked.c.place <= EACH).order_by(ranked.c.id)).all()
    found = JobRecord(
        row.registration,
        stage,
        tuple(_sample(one) for one in rows),
        tuple(oom_nodes),
        max(0.0, now - row.registered_at),
    )
    return found, rows[-1].id if rows else None


def all_samples(connection: sa.Connection, job_id: int) -> list[JobSample]:
    """Every sample of the job, the oldest first."""
    query = sa.select(job_sample).where(job_sample.c.job_id == job_id).order_by(job_sample.c.id)
    return [_sample(one) for one in connection.execute(query)]


def end(connection: sa.Connection, name: str, succeeded: bool, now: float) -> None:
    """The job is over; what its nodes used is kept. Raises `UnknownJob`."""
    row = find(connection, name)
    query = sa.select(job_sample).where(job_sample.c.job_id == row.id).order_by(job_sample.c.id.desc())
    samples = [_sample(one) for one in connection.execute(query.limit(USAGE_SAMPLES))]
    usage = PastJob(
        row.registration,
        usage_of(samples),
        statistics.median(one.speed for one in samples[:EACH]) if samples else 0.0,
        max(0.0, now - row.registered_at),
    )
    connection.execute(sa.update(job).where(job.c.id == row.id).values(ended_at=now, succeeded=succeeded, usage=usage))


def usage_of(samples: Sequence[JobSample]) -> dict[str, NodeUsage]:
    """By type of node, over samples of which the first is the newest."""
    nodes: dict[NodeType, list[list[NodeSample]]] = defaultdict(list)
    for sample in samples:
        for kind in {node.type for node in sample.nodes}:
            nodes[kind].append(sample.of(kind))
    return {kind.value: _usage(windows, samples) for kind, windows in nodes.items()}


def _usage(windows: Sequence[Sequence[NodeSample]], samples: Sequence[JobSample]) -> NodeUsage:
    every = [node for window in windows for node in window]
    by_name: dict[str, list[float]] = defaultdict(list)
    for node in every:
        by_name[node.name].append(node.cpu)
    kind = every[0].type
    return NodeUsage(
        count=len(windows[0]),
        cpu=statistics.fmean(node.cpu for node in every),
        busiest_cpu=max(statistics.fmean(cores) for cores in by_name.values()),
        total_cpu=statistics.median(sum(node.cpu for node in window) for window in windows),
        memory=max(node.memory for node in every),
        total_memory=max(sum(node.memory for node in window) for window in windows),
        resource=samples[0].largest(kind),
    )


def history(connection: sa.Connection, like: RegisterJob, before: float = math.inf) -> tuple[PastJob, ...]:
    """Jobs that succeeded `before` that time and are most like this one, the newest first.

    With the same user, script and model size; if there is none, with the same script and size, then script and user.
    """
    if not like.script_hash:
        return ()
    owner, size = job.c.owner == like.user, job.c.model_size == like.model_size
    ended = job.c.ended_at < before if math.isfinite(before) else job.c.ended_at.is_not(None)
    for match in ((owner & size) if like.user else size, size, owner):
        query = (
            sa.select(job.c.usage)
            .where(job.c.script_hash == like.script_hash, job.c.succeeded.is_(True), ended, match)
            .order_by(job.c.ended_at.desc())
            .limit(PAST_JOBS)
        )
        found = [msgspec.convert(usage, PastJob) for usage in connection.execute(query).scalars()]
        if found := [one for one in found if one.usage]:
            return tuple(found)
    return ()


def cluster(connection: sa.Connection, quotas: Mapping[str, int], now: float) -> ClusterView:
    """The newest sample of each machine, or of the whole cluster, and the jobs that run."""
    fresh = now - FRESH_S
    samples = connection.execute(
        sa.select(cluster_sample.c.view).where(cluster_sample.c.at >= fresh).order_by(cluster_sample.c.at.desc())
    ).scalars()
    capacity, sources = Counter[str](), set[str]()
    for view in samples:
        if view["source"] not in sources:
            sources.add(view["source"])
            capacity.update(view["capacity"])
    plans = sa.select(sa.func.count()).where(resource_plan.c.job_id == job.c.id).scalar_subquery()
    rows = connection.execute(
        sa.select(*_COLUMNS, job.c.curve, plans.label("plans"))
        .where(job.c.ended_at.is_(None), job.c.sampled_at >= fresh, job.c.curve.is_not(None))
    ).all()  # fmt: skip
    return ClusterView(
        capacity=dict(capacity),
        jobs=tuple(_running(_job_row(row[:5]), row.curve, row.plans, now) for row in rows if row.curve),
        quotas=dict(quotas),
    )


def keep_curve(connection: sa.Connection, job_id: int, kind: str, units: int, curve: Sequence[SpeedPoint]) -> None:
    """What the job has and would make of more or less, for plans of other jobs."""
    value = {"kind": kind, "units": units, "curve": curve}
    connection.execute(sa.update(job).where(job.c.id == job_id).values(curve=value))


def _running(row: JobRow, curve: Any, plans: int, now: float) -> ActiveJob:
    registration = row.registration
    return ActiveJob(
        registration.job, curve["kind"], curve["units"], msgspec.convert(curve["curve"], tuple[SpeedPoint, ...]),
        registration.tenant, registration.weight, max(0.0, now - row.registered_at), plans,
    )  # fmt: skip


def _job_row(row: Any) -> JobRow:
    job_id, registration, *times = row
    return JobRow(job_id, msgspec.convert(registration, RegisterJob), *times)


def _sample(row: Any) -> JobSample:
    return JobSample(row.speed, msgspec.convert(row.nodes, tuple[NodeSample, ...]))
