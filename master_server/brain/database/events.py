"""Statements on optimize events and on the plans that come of them.

An event is open, then claimed by one process until a deadline, then done or failed. Each claim has a number
(`attempts`), and only the newest one can finish the event: a process that comes back after its deadline changes
nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from dlrover_hooks.master.brain.database.tables import job, optimize_event, resource_plan
from dlrover_hooks.master.brain.messages import PlanAnswer
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import Node, ResourcePlan

ATTEMPTS = 3
"""An event whose claim ran out so often ends the processes that work on it: it fails."""
PLAN_TTL_S = 600.0
"""An older plan that its master has not fetched is not handed out: it was made for another moment."""
QUIET_EVENTS = 256
"""Finished events without a plan that are kept for each job."""


class EventKind(enum.Enum):
    """Why a plan is needed."""

    INIT = "init"
    WORKER_INITIAL = "worker_initial"
    PS_INITIAL = "ps_initial"
    PERIODIC = "periodic"
    MODEL = "model"
    OUT_OF_MEMORY = "out_of_memory"
    HOT_PS = "hot_ps"
    SLOW = "slow"
    LOW_USE = "low_use"


class NewEvent(NamedTuple):
    """An event that is to be created."""

    kind: EventKind
    stage: OptimizeStage
    reason: str
    oom_nodes: tuple[Node, ...] = ()
    config: dict[str, Any] | None = None


class Claim(NamedTuple):
    """An event that this process works on until `deadline`."""

    event_id: int
    job_id: int
    attempt: int
    deadline: float
    event: NewEvent


def create(connection: sa.Connection, job_id: int, event: NewEvent, now: float) -> int:
    """The number of the unfinished event of this kind, which another process may finish; created if there is none."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    table = optimize_event.c
    connection.execute(
        insert(optimize_event)
        .values(job_id=job_id, kind=event.kind.value, stage=event.stage.value, reason=event.reason,
                oom_nodes=event.oom_nodes, config=event.config or {}, state="open", created_at=now, attempts=0,
                decision="", error="")
        .on_conflict_do_nothing()
    )  # fmt: skip
    of_kind = sa.select(table.id).where(table.job_id == job_id, table.kind == event.kind.value)
    return connection.execute(of_kind.order_by(table.id.desc()).limit(1)).scalar_one()


def last_created(connection: sa.Connection, job_id: int) -> dict[EventKind, float]:
    """When the newest event of each kind was created."""
    table = optimize_event.c
    rows = connection.execute(
        sa.select(table.kind, sa.func.max(table.created_at)).where(table.job_id == job_id).group_by(table.kind)
    )
    return {EventKind(kind): at for kind, at in rows}


def _due(now: float) -> sa.ColumnElement[bool]:
    table = optimize_event.c
    return (table.state == "open") | ((table.state == "claimed") & (table.claim_deadline < now))


def next_due(connection: sa.Connection, now: float) -> int | None:
    """The oldest event that is open, or whose claim has run out."""
    query = sa.select(optimize_event.c.id).where(_due(now)).order_by(optimize_event.c.id).limit(1)
    return connection.execute(query).scalar_one_or_none()


def claim(connection: sa.Connection, event_id: int, worker: str, now: float, seconds: float) -> Claim | None:
    """None: another process has it, or it is finished. One claimed too often fails."""
    table, deadline = optimize_event.c, now + seconds
    taken = connection.execute(
        sa.update(optimize_event)
        .where(table.id == event_id, _due(now), table.attempts < ATTEMPTS)
        .values(state="claimed", attempts=table.attempts + 1, claimed_by=worker, claim_deadline=deadline)
    ).rowcount
    if not taken:
        why = f"{ATTEMPTS} processes ended, or took too long, while they worked on it"
        connection.execute(
            sa.update(optimize_event)
            .where(table.id == event_id, _due(now), table.attempts >= ATTEMPTS)
            .values(state="failed", finished_at=now, error=why)
        )
        return None
    row = connection.execute(sa.select(optimize_event).where(table.id == event_id)).one()
    nodes = msgspec.convert(row.oom_nodes, tuple[Node, ...])
    event = NewEvent(EventKind(row.kind), OptimizeStage(row.stage), row.reason, nodes, row.config)
    return Claim(event_id, row.job_id, row.attempts, deadline, event)


def finish(
    connection: sa.Connection, claimed: Claim, answer: PlanAnswer, now: float, *, error: str = "",
    sample_id: int | None = None,
) -> bool:  # fmt: skip
    """The event is done; a plan that is not empty gets a number. False: the claim has run out and was taken over.

    The row of the job is locked first, so that two events of it do not take the same number.
    """
    table = optimize_event.c
    connection.execute(sa.select(job.c.id).where(job.c.id == claimed.job_id).with_for_update())
    done = connection.execute(
        sa.update(optimize_event)
        .where(table.id == claimed.event_id, table.state == "claimed", table.attempts == claimed.attempt)
        .values(state="done", finished_at=now, decision=f"{answer.algorithm}: {answer.reason}", error=error)
    ).rowcount
    if not done:
        return False
    if answer.plan.empty:
        _forget_quiet(connection, claimed.job_id)
        return True
    number = newest_plan(connection, claimed.job_id) + 1
    connection.execute(
        sa.insert(resource_plan).values(
            job_id=claimed.job_id, number=number, event_id=claimed.event_id, stage=claimed.event.stage.value,
            algorithm=answer.algorithm, reason=answer.reason, plan=answer.plan, predicted=answer.predicted,
            sample_id=sample_id, made_at=now,
        )
    )  # fmt: skip
    return True


def drop_open(connection: sa.Connection, job_id: int, why: str, now: float) -> None:
    """The unfinished events of a job that has ended fail."""
    table = optimize_event.c
    connection.execute(
        sa.update(optimize_event)
        .where(table.job_id == job_id, table.state.in_(("open", "claimed")))
        .values(state="failed", finished_at=now, error=why)
    )


def outcome(connection: sa.Connection, event_id: int) -> PlanAnswer | None:
    """What came of an event; None: it is not finished."""
    table = optimize_event.c
    row = connection.execute(sa.select(table.state, table.decision, table.error).where(table.id == event_id)).first()
    if row is not None and row.state in ("open", "claimed"):
        return None
    plan = connection.execute(sa.select(resource_plan).where(resource_plan.c.event_id == event_id)).first()
    if plan is not None:
        return _answer(plan)
    return PlanAnswer(reason=row.decision or row.error if row else "the event was forgotten")


def unseen_plan(
    connection: sa.Connection, job_id: int, stage: OptimizeStage, have: int, now: float
) -> PlanAnswer | None:
    """The newest plan of this stage that the master has not got; None: there is none, or it is too old."""
    table = resource_plan.c
    fresh = table.made_at > now - PLAN_TTL_S
    query = sa.select(resource_plan).where(
        table.job_id == job_id, table.stage == stage.value, table.number > have, fresh
    )
    row = connection.execute(query.order_by(table.number.desc()).limit(1)).first()
    return None if row is None else _answer(row)


def newest_plan(connection: sa.Connection, job_id: int) -> int:
    """Its number; 0: there is none."""
    query = sa.select(sa.func.max(resource_plan.c.number)).where(resource_plan.c.job_id == job_id)
    return connection.execute(query).scalar_one() or 0


def _answer(row: Any) -> PlanAnswer:
    plan = msgspec.convert(row.plan, ResourcePlan)
    return PlanAnswer(plan, row.number, row.algorithm, row.reason, row.predicted)


def _forget_quiet(connection: sa.Connection, job_id: int) -> None:
    """A job that is asked for every half minute has thousands of events that changed nothing."""
    table = optimize_event.c
    without = sa.select(table.id).where(
        table.job_id == job_id, table.state == "done", ~sa.exists().where(resource_plan.c.event_id == table.id)
    )
    oldest = connection.execute(without.order_by(table.id.desc()).offset(QUIET_EVENTS)).scalars().all()
    if oldest:
        connection.execute(sa.delete(optimize_event).where(table.id.in_(oldest)))


def plans(connection: sa.Connection, job_id: int) -> Sequence[Any]:
    """The rows of the job's plans, the oldest first."""
    query = sa.select(resource_plan).where(resource_plan.c.job_id == job_id).order_by(resource_plan.c.number)
    return connection.execute(query).all()
