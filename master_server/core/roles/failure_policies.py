"""Handles the end of a worker that is not done: charges the budgets, then applies the policy of its role."""

from __future__ import annotations

from dlrover_hooks.master.core.roles import role_state
from dlrover_hooks.master.core.roles.role_state import RoleJob, WorkerRecord, begin_life, charge, node_budget, note
from dlrover_hooks.protocol import FailurePolicy, JobPhase, WorkerCause, WorkerState


def failed(
    roles: RoleJob,
    worker: WorkerRecord,
    cause: WorkerCause,
    detail: str,
    now: float,
    *,
    recovers: bool,
    policy: FailurePolicy | None = None,
) -> None:
    """`worker` has ended in its current life. `recovers`, `policy`: see `WorkerEnded`."""
    what = f"{cause.value}: {detail.strip()}" if detail.strip() else cause.value
    note(roles, now, "lost", worker, text=cause.value, detail=detail.strip())
    place, rules = f"worker {worker.rank} of role {worker.role!r}", roles.rules[worker.role]
    _charge_node(roles, worker, cause, now)
    if cause is WorkerCause.PREEMPTED:
        over = charge(roles, "preemption", roles.budgets.preemptions, now)
    else:
        over = charge(roles, f"worker {worker.role}", rules.worker_restarts, now)
    asked = policy is not None
    policy = policy or rules.on_failure
    if cause is WorkerCause.WRONG_SETTING:
        over = "a restart does not help"
    elif cause is WorkerCause.NEVER_STARTED and not worker.former:
        over = "no process of it has ever registered"
    elif policy is FailurePolicy.FAIL:
        over = "a plug-in ends the job" if asked else f"on_failure of role {worker.role!r} is 'fail'"
    what = what.splitlines()[0]  # the event "lost" has all of it
    if not over:
        over = _follow(roles, worker, policy, what, now, recovers=recovers)
    if over:
        role_state.end(roles, now, JobPhase.FAILED, f"{place}: {what}; {over}")


def _charge_node(roles: RoleJob, worker: WorkerRecord, cause: WorkerCause, now: float) -> None:
    """Count a failure of the worker's node, and avoid the node if there are too many: this never ends the job.

    Preemptions and exceptions are not failures of the node.
    """
    node = worker.node
    if not node or cause in (WorkerCause.PREEMPTED, WorkerCause.RAISED):
        return
    if charge(roles, node_budget(node), roles.budgets.node_failures, now) and node not in roles.avoid:
        roles.avoid.append(node)
        note(roles, now, "avoid", text="too many workers failed on a node", detail=node)


def _follow(
    roles: RoleJob, worker: WorkerRecord, policy: FailurePolicy, why: str, now: float, *, recovers: bool
) -> str:
    """Start the workers that the policy requires. Returns why a budget is used up; empty: it is not."""
    others, instead = roles.workers[worker.role], ""
    if policy is FailurePolicy.REJOIN and len(others) > 1:
        if any(one.state is WorkerState.DONE for one in others):
            instead = "instead of 'rejoin': a worker of the role is done"
        elif not recovers:
            instead = "instead of 'rejoin': the other workers do not recover in their processes"
    if policy is FailurePolicy.ROLE or instead:
        over = charge(roles, f"role {worker.role}", roles.rules[worker.role].role_restarts, now)
        if not over:
            restart_role(roles, worker.role, why, now, text=instead)
        return over
    if policy is FailurePolicy.JOB:
        over = charge(roles, "job", roles.budgets.job_restarts, now)
        if not over:
            note(roles, now, FailurePolicy.JOB.value, detail=why)
            for of in roles.workers.values():
                for one in of:
                    begin_life(roles, one, now, why)
        return over
    begin_life(roles, worker, now, why)
    note(roles, now, policy.value, worker, detail=why)
    return ""


def restart_role(roles: RoleJob, role: str, why: str, now: float, *, text: str = "") -> None:
    """Start all workers of a role again, including those that were done. `text`: of the event."""
    note(roles, now, FailurePolicy.ROLE.value, role=role, text=text, detail=why)
    for one in roles.workers[role]:
        begin_life(roles, one, now, why)
