"""Requests about a job of several roles. Each is checked, then changes the state, then wakes waiting requests.

PrimeMaster, SubMasters and users are not members of the job and may use any incarnation. Their requests can be sent
twice without a second effect, because they name a life or a submission, or have an idempotency key.
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import BadRequest, Conflict, Stale
from dlrover_hooks.master.core.effects import Wake, roles_topic, watch_topic
from dlrover_hooks.master.core.job import Effects, Job, arm
from dlrover_hooks.master.core.roles import failure_policies, role_state
from dlrover_hooks.master.core.roles.role_state import RoleJob, WorkerRecord, find, note
from dlrover_hooks.protocol import (
    MOST_BUDGET,
    MOST_ROLE_WORKERS,
    UNLIMITED,
    AwaitRoles,
    Done,
    FailurePolicy,
    JobPhase,
    MasterRestarted,
    NodesRelaunched,
    PluginFailed,
    RegisterWorker,
    RestartRole,
    Roles,
    RoleWorker,
    StartRoles,
    StopRoles,
    WorkerCause,
    WorkerEnded,
    WorkerState,
    WorkerWaits,
)

_MOST_TEXT = 4000
"""Longer texts are shortened to about this many characters."""
_END = "End this process: another one has its rank, or the job is over."


def start(job: Job, event: StartRoles, now: float, effects: Effects) -> Roles:
    """Start the job. Raises BadRequest, Conflict, Stale."""
    roles = job.roles
    if roles is not None and roles.submission == event.submission:
        return role_state.view(roles, now)
    if roles is not None and event.submission in roles.former:
        raise Stale(f"Submission {event.submission!r} of job {job.name!r} was replaced by a later one.", hint=_END)
    if roles is not None and not roles.over and not event.takes_over:
        raise Conflict(
            f"Job {job.name!r} already runs.",
            hint="Stop it first, or submit(job_name=ANOTHER).",
        )
    _check(job, event)
    job.roles = role_state.started(event.submission, event.roles, event.budgets, event.spec, now)
    job.roles.plugins = list(event.plugins)
    if roles is not None:
        role_state.follow_up(job.roles, roles)
    job.finished, job.finished_step, job.finish_written = False, None, False
    _follow(job, job.roles, now, effects)
    return role_state.view(job.roles, now)


def _check(job: Job, event: StartRoles) -> None:
    names = [one.name for one in event.roles]
    if not names or len(set(names)) != len(names) or not all(names):
        raise BadRequest(f"Job {job.name!r} needs roles with different names, not {names}.")
    if not any(one.driver for one in event.roles):
        raise BadRequest(f"Job {job.name!r} has no driver role, so it would never end.", hint="Leave out not_driver().")
    total = sum(one.workers for one in event.roles)
    if min(one.workers for one in event.roles) < 1 or total > MOST_ROLE_WORKERS:
        raise BadRequest(
            f"The roles of job {job.name!r} have {[one.workers for one in event.roles]} workers.",
            hint=f"Each needs at least one, and all together have at most {MOST_ROLE_WORKERS}.",
        )
    limits = [event.budgets.job_restarts, event.budgets.preemptions, event.budgets.node_failures]
    limits += [limit for one in event.roles for limit in (one.worker_restarts, one.role_restarts)]
    for wrong in [one for one in limits if not UNLIMITED <= one <= MOST_BUDGET]:
        raise BadRequest(f"A budget of job {job.name!r} is {wrong}.", hint="Give 0 or more, or -1 for no limit.")
    if job.ps is not None or job.scaling is not None:
        raise BadRequest(
            f"Job {job.name!r} has parameter servers or planned nodes, so it cannot have roles.",
            hint="Use another name.",
        )


def register(job: Job, event: RegisterWorker, now: float, effects: Effects) -> RoleWorker:
    """Register a worker's process. Raises BadRequest, Stale."""
    roles = _roles(job)
    worker = _current(job, roles, event.role, event.rank, event.life)
    place = (worker.role, worker.rank)
    if not event.incarnation or roles.incarnations.get(event.incarnation, place) != place:
        raise BadRequest(
            f"{event.incarnation!r} cannot be {_name(worker)} of job {job.name!r}: it is empty or another worker's.",
            hint="Give each process its own incarnation.",
        )
    if worker.state is WorkerState.DONE or worker.incarnation not in ("", event.incarnation):
        raise Stale(f"{_name(worker)} of job {job.name!r} is held by process {worker.incarnation!r}.", hint=_END)
    if worker.state is WorkerState.INITIAL:
        worker.state, worker.incarnation, worker.waits = WorkerState.RUNNING, event.incarnation, ""
        worker.node, worker.pid, worker.address = event.node, event.pid, event.address
        roles.incarnations[event.incarnation] = place
        note(roles, now, "running", worker, detail=f"node {event.node}, pid {event.pid}")
        _follow(job, roles, now, effects)
    return role_state.shown(worker)


def ended(job: Job, event: WorkerEnded, now: float, effects: Effects) -> Done:
    """A process has ended. Raises BadRequest if there is no such worker."""
    roles = _roles(job)
    worker = find(roles, event.role, event.rank)
    if worker is None:
        raise _unknown(job, event.role, event.rank)
    if roles.over or worker.life != event.life or worker.state is WorkerState.DONE:
        return Done()
    if event.cause is None:
        _done(roles, worker, now)
    else:
        _failed(job, roles, worker, event.cause, event.detail, now, recovers=event.recovers, policy=event.policy)
    _follow(job, roles, now, effects)
    return Done()


def _done(roles: RoleJob, worker: WorkerRecord, now: float) -> None:
    roles.incarnations.pop(worker.incarnation, None)
    worker.state = WorkerState.DONE
    note(roles, now, "done", worker)
    if role_state.all_drivers_done(roles):
        role_state.end(roles, now, JobPhase.DONE, "all workers of the driver roles are done")


def _failed(
    job: Job,
    roles: RoleJob,
    worker: WorkerRecord,
    cause: WorkerCause,
    detail: str,
    now: float,
    *,
    recovers: bool,
    policy: FailurePolicy | None = None,
) -> None:
    job.replies.pop(worker.incarnation, None)
    failure_policies.failed(roles, worker, cause, _shortened(detail), now, recovers=recovers, policy=policy)


def waits(job: Job, event: WorkerWaits, now: float, effects: Effects) -> Done:
    """Record why a process cannot be started yet. Raises BadRequest."""
    roles = _roles(job)
    worker = find(roles, event.role, event.rank)
    if worker is None:
        raise _unknown(job, event.role, event.rank)
    reason = event.reason[:_MOST_TEXT]
    current = not roles.over and worker.life == event.life
    if current and worker.state is WorkerState.INITIAL and worker.waits != reason:
        worker.waits = reason
        note(roles, now, "waits", worker, detail=reason)
        _follow(job, roles, now, effects)
    return Done()


def master_restarted(job: Job, event: MasterRestarted, now: float, effects: Effects) -> Done:
    """Record that a SubMaster or the PrimeMaster was started again. Raises BadRequest."""
    roles = _roles(job)
    note(roles, now, "sub_master" if event.role else "prime_master", role=event.role, text="started again")
    _follow(job, roles, now, effects)
    return Done()


def plugin_failed(job: Job, event: PluginFailed, now: float, effects: Effects) -> Done:
    """Record and count a failed function of a plug-in. Raises BadRequest."""
    roles = _roles(job)
    detail = event.detail[:_MOST_TEXT]
    roles.plugins = [
        msgspec.structs.replace(one, failures=one.failures + 1, problem=f"{event.function}: {detail}")
        if one.name == event.plugin
        else one
        for one in roles.plugins
    ]
    note(roles, now, "plugin", text=f"{event.plugin}: {event.function} failed", detail=detail)
    _follow(job, roles, now, effects)
    return Done()


def nodes_relaunched(job: Job, event: NodesRelaunched, now: float, effects: Effects) -> Done:
    """Forget the failures of nodes that a plug-in has replaced. Raises BadRequest."""
    roles = _roles(job)
    for node in [one for one in event.nodes if one in roles.avoid]:
        roles.avoid.remove(node)
        roles.failures.pop(role_state.node_budget(node), None)
        note(roles, now, "relaunched", text="a plug-in has relaunched a node", detail=node)
    _follow(job, roles, now, effects)
    return Done()


def restart_role(job: Job, event: RestartRole, now: float, effects: Effects) -> Roles:
    """Start all workers of a role again, for a user. Raises BadRequest, Stale."""
    roles = _roles(job)
    if event.role not in roles.workers:
        raise BadRequest(f"Job {job.name!r} has no role {event.role!r}: it has {sorted(roles.workers)}.")
    if roles.over:
        raise Stale(f"Job {job.name!r} is over: {roles.phase.value}.", hint="Submit it again.")
    failure_policies.restart_role(roles, event.role, event.reason[:_MOST_TEXT], now)
    _follow(job, roles, now, effects)
    return role_state.view(roles, now)


def stop(job: Job, event: StopRoles, now: float, effects: Effects) -> Roles:
    """End the job. Raises BadRequest."""
    roles = _roles(job)
    if not roles.over:
        phase = JobPhase.FAILED if event.failed else JobPhase.STOPPED
        role_state.end(roles, now, phase, event.reason[:_MOST_TEXT])
        _follow(job, roles, now, effects)
    return role_state.view(roles, now)


def part(job: Job, incarnation: str, now: float, effects: Effects, *, lost: bool) -> None:
    """The process `incarnation` was declared dead (`lost`), or has left. Ignored if it is no worker of a role.

    A process that has left is not counted here, because its SubMaster reports how it ended.
    """
    roles = job.roles
    place = roles.incarnations.get(incarnation) if roles is not None else None
    if roles is None or place is None:
        return
    if not lost:  # it has left: heartbeats are no longer expected
        del roles.incarnations[incarnation]
        return
    worker = roles.workers[place[0]][place[1]]
    _failed(job, roles, worker, WorkerCause.SILENT, "it was declared dead", now, recovers=True)
    _follow(job, roles, now, effects)


def tick(job: Job, now: float, effects: Effects) -> None:
    """Fail the workers that have not registered by their deadlines."""
    roles = job.roles
    if roles is None or roles.due() > now:
        return
    for worker in [one for of in roles.workers.values() for one in of]:
        if not roles.over and worker.state is WorkerState.INITIAL and worker.due <= now:
            detail = f"it was not up after {roles.budgets.ready_s:g} s"
            detail += f": {worker.waits}" if worker.waits else ""
            _failed(job, roles, worker, WorkerCause.NEVER_STARTED, detail, now, recovers=True)
    _follow(job, roles, now, effects)


# ---- queries ---------------------------------------------------------------------------------------------------------


def show(job: Job, role: str, now: float) -> Roles:
    """The state of the job. Raises BadRequest."""
    roles = _roles(job)
    if role and role not in roles.workers:
        raise BadRequest(f"Job {job.name!r} has no role {role!r}: it has {sorted(roles.workers)}.")
    return role_state.view(roles, now, role)


def awaited(job: Job, request: AwaitRoles, now: float) -> Roles | None:
    """The state of the job if it has changed since `request.after`; None: it has not. Raises BadRequest."""
    roles = _roles(job)
    return show(job, request.role, now) if roles.number > request.after else None


# ---- common ----------------------------------------------------------------------------------------------------------


def _roles(job: Job) -> RoleJob:
    if job.roles is None:
        raise BadRequest(f"Job {job.name!r} has no roles.", hint="Submit it first, with StartRoles.")
    return job.roles


def _current(job: Job, roles: RoleJob, role: str, rank: int, life: int) -> WorkerRecord:
    worker = find(roles, role, rank)
    if worker is None:
        raise _unknown(job, role, rank)
    if roles.over:
        raise Stale(f"Job {job.name!r} is over: {roles.phase.value}.", hint=_END)
    if worker.life != life:
        raise Stale(
            f"Life {life} of {_name(worker)} of job {job.name!r} is over: life {worker.life} is current.", hint=_END
        )
    return worker


def _shortened(text: str) -> str:
    """`text`; of a long one the beginning of the first line, which names the exception, and the end."""
    if len(text) <= _MOST_TEXT:
        return text
    first, _, rest = text.partition("\n")
    return f"{first[: _MOST_TEXT // 2]}\n...\n{rest[-_MOST_TEXT // 2 :]}"


def _name(worker: WorkerRecord) -> str:
    return f"worker {worker.rank} of role {worker.role!r}"


def _unknown(job: Job, role: str, rank: int) -> BadRequest:
    return BadRequest(f"Job {job.name!r} has no worker {rank} of role {role!r}.", hint="See `GET /v1/jobs/JOB/roles`.")


def _follow(job: Job, roles: RoleJob, now: float, effects: Effects) -> None:
    if roles.over and not job.finished:
        job.finished, job.finished_step = True, job.finished_step or 0
        effects.append(Wake(topic=watch_topic(job.name)))
    effects.append(Wake(topic=roles_topic(job.name)))
    arm(job, now, effects)
