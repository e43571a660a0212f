"""All jobs of one master: finds the job of an event and prevents two live jobs from using one checkpoint URL."""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec

from dlrover_hooks.errors import BadRequest, JobAlive, SaveToBusy, UnknownJob
from dlrover_hooks.master.core import dispatch, job as one
from dlrover_hooks.master.core.dispatch import EventOutcome
from dlrover_hooks.master.core.effects import (
    Deadline,
    Effect,
    ReleaseClaims,
    Wake,
    check_topic,
    cluster_topic,
    nodes_topic,
    parting_topic,
    plan_topic,
    roles_topic,
    round_topic,
    shards_topic,
    tasks_topic,
    watch_topic,
)
from dlrover_hooks.master.core.events import ForgetFinished, Key
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.protocol import (
    Attach,
    DeleteJob,
    Done,
    Join,
    JoinCheck,
    Message,
    OpenLedger,
    ScaleTasks,
    StartRoles,
    StartScaling,
)

_TOPICS = (round_topic, plan_topic, parting_topic, watch_topic, tasks_topic, cluster_topic, check_topic, nodes_topic,
           roles_topic)  # fmt: skip
"""Of every job; those of its ledgers have the name of the ledger too."""


class Master(msgspec.Struct):
    """The complete journaled state."""

    jobs: dict[str, Job] = {}
    owners: dict[str, str] = {}
    """Job by the checkpoint URL it saves to."""
    now: float = 0.0
    """Time of the last event: a restarted master continues from it."""


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_DECODER = msgspec.msgpack.Decoder(Master)


def encode(state: Master) -> bytes:
    """The state as MessagePack. Equal states give equal bytes."""
    return _ENCODER.encode(state)


def decode(data: bytes) -> Master:
    """The state from `encode`."""
    return _DECODER.decode(data)


def job_named(state: Master, name: str) -> Job:
    """The job called `name`. Raises UnknownJob."""
    if name not in state.jobs:
        raise UnknownJob(
            f"This master keeps no job {name!r}.",
            hint="Check --job and the master's address; a job exists from its first join on.",
        )
    return state.jobs[name]


def apply(state: Master, event: Message, now: float, key: Key | None = None) -> EventOutcome:
    """Apply `event` to `state`. If this raises a MasterError nothing was changed."""
    outcome = _apply(state, event, now, key)
    if not outcome.repeated:
        state.now = now
    return outcome


def repeated(state: Master, event: Message, key: Key) -> Message | None:
    """The reply to an event that was applied before; None if it was not. Raises Stale if a later one was."""
    job = state.jobs.get(getattr(event, "job", ""))
    return None if job is None else dispatch.repeated(job, event, key)


def _apply(state: Master, event: Message, now: float, key: Key | None) -> EventOutcome:
    if isinstance(event, Join):
        return _join(state, event, now, key)
    if isinstance(event, (ScaleTasks, JoinCheck, StartScaling, StartRoles)) or (
        isinstance(event, OpenLedger) and event.free
    ):
        return _create(state, event, now, key)
    if isinstance(event, DeleteJob):
        return _delete(state, event)
    if isinstance(event, ForgetFinished):
        return _forget(state, finished_before(state, event.before))
    job = job_named(state, cast(Any, event).job)
    if not isinstance(event, Attach):
        return dispatch.apply(job, event, now, key)
    _check_owner(state, event)
    outcome = dispatch.apply(job, event, now, key)
    if job.settings.save_to is not None:
        state.owners[job.settings.save_to] = job.name
    return outcome


def _join(state: Master, event: Join, now: float, key: Key | None) -> EventOutcome:
    if not event.job or not event.proposed_run:
        raise BadRequest("A join needs a job name and a proposed run.", hint="Set --job or DLROVER_HOOKS_JOB.")
    _check_name(event.job)
    job = state.jobs.get(event.job) or Job(name=event.job, run=event.proposed_run, fresh=event.fresh)
    outcome = dispatch.apply(job, event, now, key)
    state.jobs[event.job] = job
    return outcome


def _create(
    state: Master, event: OpenLedger | ScaleTasks | JoinCheck | StartScaling | StartRoles, now: float, key: Key | None
) -> EventOutcome:
    """Apply an event that may create the job before any process has joined. The first join then names its run."""
    if not event.job:
        raise BadRequest(
            "A ledger, a task, a node check or a plan needs a job's name.", hint="Set --job or DLROVER_HOOKS_JOB."
        )
    _check_name(event.job)
    job = state.jobs.get(event.job) or Job(name=event.job, run="")
    outcome = dispatch.apply(job, event, now, key)
    state.jobs[event.job] = job
    return outcome


def _delete(state: Master, event: DeleteJob) -> EventOutcome:
    job = job_named(state, event.job)
    if not event.force and job.processes:
        raise JobAlive(
            f"Job {job.name!r} has {job.processes} workers, agents or nodes under check that live: it is not deleted.",
            hint="End it first, or force it (--force): they are then refused and end.",
        )
    return _forget(state, [event.job])


def finished_before(state: Master, before: float) -> list[str]:
    """The jobs that are over and had no event after `before`."""
    return [name for name, job in state.jobs.items() if job.changed_at <= before and job.over]


def _forget(state: Master, names: list[str]) -> EventOutcome:
    """Delete these jobs. Requests that wait for one of them are answered with UnknownJob."""
    effects: list[Effect] = []
    for name in names:
        job = state.jobs.pop(name)
        topics = [topic(name) for topic in _TOPICS]
        topics += [shards_topic(name, ledger) for ledger in job.ledgers.named]
        effects += [*(Wake(topic=topic) for topic in topics), Deadline(job=name, at=math.inf), ReleaseClaims(job=name)]
    if names:
        state.owners = {url: owner for url, owner in state.owners.items() if owner in state.jobs}
    return EventOutcome(reply=Done(), effects=tuple(effects))


_PARTS = ("/tasks", "/vitals", "/check", "/plans")
_ENDINGS = ", ".join(map(repr, _PARTS[:-1])) + f" or {_PARTS[-1]!r}"


def _check_name(job: str) -> None:
    """A job is shown at `/v1/jobs/NAME`, its parts at `/v1/jobs/NAME/ledgers/...`, `.../tasks` and so on.

    Raises BadRequest.
    """
    if not job.isprintable() or "/ledgers/" in job or job.endswith(_PARTS):
        raise BadRequest(
            f"The job's name {job!r} has a control character or '/ledgers/' in it, or ends with {_ENDINGS}.",
            hint="Give --job another name.",
        )


def check_attach(state: Master, event: Attach) -> None:
    """Check the sender of an attach before its checkpoint URL is claimed. Raises what `apply` would raise."""
    one.seat(job_named(state, event.job), event.incarnation)
    _check_owner(state, event)


def writes(state: Master, name: str) -> bool:
    """True if that job needs its claims."""
    job = state.jobs.get(name)
    return job is not None and job.writes


def _check_owner(state: Master, event: Attach) -> None:
    url = event.save_to.rstrip("/") if event.save_to else ""
    owner = state.owners.get(url, event.job)
    if owner == event.job or not writes(state, owner):
        return
    raise SaveToBusy(
        f"Job {owner!r} is alive and saves to {url}; job {event.job!r} must not.",
        hint="Give each job a save_to of its own, or stop the other one.",
    )


def unfinished_effects(state: Master) -> list[Effect]:
    """The effects that a restarted master must perform again."""
    return [effect for _, job in sorted(state.jobs.items()) for effect in one.unfinished_effects(job)]
