"""Changes of a job's membership: joins, departures, losses, and deadlines."""

from __future__ import annotations

import math

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import straggler_actions
from dlrover_hooks.master.core.checkpoints import save_votes
from dlrover_hooks.master.core.checkpoints.restore_sources import Offers
from dlrover_hooks.master.core.effects import ReleaseClaims, RoundFormed, Wake, plan_topic, round_topic, watch_topic
from dlrover_hooks.master.core.events import EndSlow, EndStalled, Lost, Reshare, Tick
from dlrover_hooks.master.core.job import (
    Choice,
    Effects,
    Job,
    Leaving,
    StallRestarts,
    StragglerActions,
    arm,
    finishing,
    knows,
    persist_due_at,
    tell_of_newcomers,
)
from dlrover_hooks.master.core.job_scaling import plan_requests
from dlrover_hooks.master.core.leased_data import job_ledgers
from dlrover_hooks.master.core.node_check import check_requests
from dlrover_hooks.master.core.ps_clusters import task_requests
from dlrover_hooks.master.core.roles import role_requests
from dlrover_hooks.master.core.rounds import preemption_agreement, rank_assignment, rendezvous
from dlrover_hooks.master.core.rounds.key_value_store import Keys
from dlrover_hooks.master.core.rounds.members import SLOW, STALLED
from dlrover_hooks.master.core.rounds.rendezvous import Rounds
from dlrover_hooks.protocol import REQUEUE, Departure, Done, Exited, Join, Joined, Leave, Phase, StragglerPolicy


def join(job: Job, event: Join, now: float, effects: Effects) -> Joined:
    """An agent requests ranks, or its old ones again. A finished job only replies that it is, unless it is to continue.

    Raises Stale, BadRequest.
    """
    if event.agents and event.max_workers == 0:
        if job.rounds.number == 0:
            raise Stale(
                f"Job {job.name!r} has had no round: no request has named its number of workers.", hint="Join again."
            )
        low, high = job.rounds.min_workers, job.rounds.max_workers
        event = msgspec.structs.replace(event, min_workers=low, max_workers=high)
    if event.node in job.slow.excluded and not event.again:
        raise _is_excluded(job, event.node)
    if _starts_anew(job, event):
        rendezvous.check(Rounds(), event)
        _reset(job, event)
    if job.finished:
        return Joined(job=job.name, run=job.run, finished=True, finished_step=job.finished_step)
    newcomer = _is_newcomer(job, event)
    if newcomer and event.shrinks and job.standing > len(rendezvous.predecessors(job.rounds, event)):
        raise _no_growth(job, event)
    rendezvous.check(job.rounds, event)
    predecessors = rendezvous.predecessors(job.rounds, event)
    launched = newcomer and not event.launcher  # the job is launched again
    relaunched = launched and event.again and (job.ending is not None or job.standing == len(predecessors))
    job.check.kept_out.pop(event.node, None)
    job.slow = straggler_actions.readmitted(job.slow, event.node)
    if event.serves:
        job.served_at = event.node
    job.proposed = event.proposed_run
    if not job.run:  # lease holders without a rank came first
        job.run, job.fresh = event.proposed_run, event.fresh
    broken = any([rendezvous.part(job.rounds, name, rendezvous.LOST) for name in predecessors])
    job.failures = 0 if relaunched else job.failures + broken
    if launched or (job.rounds.round is None and not job.standing):
        job.ending = None
    if relaunched:
        job.stalls, job.slow = StallRestarts(), StragglerActions()
    exited = job.rounds.round is not None and job.rounds.round.exited > 0
    if rendezvous.add(job.rounds, event, now):
        job.failures += exited and not launched and not broken  # the others cannot continue without the exited one
        broken = True
    _after_membership(job, now, effects, broken=broken)
    return Joined(job=job.name, run=job.run)


def _is_newcomer(job: Job, event: Join) -> bool:
    """True if a round has formed and the sender had no part in the last one."""
    current = job.rounds.round
    return current is not None and event.incarnation not in current.agents and event.incarnation not in current.members


def _no_growth(job: Job, event: Join) -> BadRequest:
    return BadRequest(
        f"Job {job.name!r} goes on with what is left of it and does not grow: node {event.node!r} is refused.",
        hint="Launch it with --fault-level elastic if newcomers are to be taken in, hot if they are to replace others.",
    )


def _is_excluded(job: Job, node: str) -> BadRequest:
    return BadRequest(
        f"Node {node!r} is excluded from job {job.name!r}: {job.slow.excluded[node]}.",
        hint="Replace that node, or launch the job on it again to take it back.",
    )


def _starts_anew(job: Job, event: Join) -> bool:
    """True if the job's state is to be reset: a finished job is launched again and has a `save_to`, or `fresh` is set.

    `fresh` is applied once per launch: to a finished job, or to one in which only processes remain that this agent
    replaces.
    """
    if job.finished:
        return event.fresh or (event.again and job.settings.save_to is not None)
    if not event.fresh:
        return False
    current, predecessors = job.rounds.round, rendezvous.predecessors(job.rounds, event)
    known = current is not None and event.incarnation in current.agents
    return current is not None and not known and job.standing == len(predecessors)


def _reset(job: Job, event: Join) -> None:
    """Reset all but the name. The run is new unless storage has one. Round, plan and place counters only increase."""
    number, places, seen = job.rounds.number, job.rounds.places, job.rounds.places_seen
    new = Job(
        name=job.name,
        run=event.proposed_run,
        fresh=event.fresh,
        rounds=Rounds(number=number, places=places, places_seen=seen),
        plan=Choice(number=job.plan.number),
        check=job.check,
    )
    for field in Job.__struct_fields__:
        setattr(job, field, getattr(new, field))


def lost(job: Job, event: Lost, now: float, effects: Effects) -> Done:
    """An agent or a worker was declared dead."""
    return _part(job, event.incarnation, rendezvous.LOST, now, effects)


def end_stalled(job: Job, event: EndStalled, now: float, effects: Effects) -> Done:
    """Members make no steps and are to be replaced. No effect if their round is over by now."""
    current = job.rounds.round
    if current is not None and current.number == event.round and current.phase is Phase.TRAINING:
        job.stalls = StallRestarts(job.stalls.count + 1, event.step)
        for incarnation in event.incarnations:
            _part(job, incarnation, STALLED, now, effects)
    return Done()


def end_slow(job: Job, event: EndSlow, now: float, effects: Effects) -> Done:
    """A member is slow and is to be replaced, or its node is. No effect if that is no longer possible."""
    current = job.rounds.round
    if current is None or current.number != event.round or current.phase is not Phase.TRAINING:
        return Done()
    member = current.members.get(event.incarnations[0])
    if member is None or not member.live or straggler_actions.obstacle(job, current, member, event.policy):
        return Done()
    if event.policy is StragglerPolicy.EXCLUDE and straggler_actions.plans_nodes(job):
        job.slow = straggler_actions.counted(job.slow, now)
        plan_requests.replace(job, member.node, event.reason, now, effects)
        return Done()
    job.slow = straggler_actions.noted(job.slow, member, event, now)
    for incarnation in event.incarnations:
        _part(job, incarnation, SLOW, now, effects)
    return Done()


def reshare(job: Job, event: Reshare, now: float, effects: Effects) -> Done:
    """The next round shares a step's micro-batches otherwise, because a member is slow. No effect if the round ends."""
    current = job.rounds.round
    if current is None or current.number != event.round or current.phase is not Phase.TRAINING:
        return Done()
    member = current.members.get(event.incarnation)
    if member is None or not member.live or straggler_actions.no_reshare(job, current, member):
        return Done()
    job.slow = straggler_actions.counted(job.slow, now)
    current.phase, current.next_shares, current.rebalance = Phase.BROKEN, event.shares, event.reason
    _after_membership(job, now, effects, broken=True)
    return Done()


def exited(job: Job, event: Exited, now: float, effects: Effects) -> Done:
    """A launcher reports the exit of its worker. Raises Stale, BadRequest."""
    if event.worker in job.ledgers.free:  # its launcher holds no ranks either, so it is unknown here
        return _part(job, event.worker, rendezvous.LOST, now, effects)
    reapers = rendezvous.reapers(job.rounds, event.worker)
    member = job.rounds.round.members.get(event.worker) if job.rounds.round else None
    unseated = event.newcomer and member is None and not rendezvous.is_over(job.rounds, event.worker)
    if event.incarnation not in reapers and not (unseated or rendezvous.knows(job.rounds, event.incarnation)):
        raise Stale(f"Agent {event.incarnation!r} is no part of job {job.name!r}.", hint="Join again.")
    if reapers and event.incarnation not in reapers:
        raise BadRequest(f"Worker {event.worker!r} of job {job.name!r} belongs to another agent.")
    if unseated:  # the worker's own join may still arrive
        job.failures += event.exit_code not in _POLITE
        rendezvous.remember(job.rounds, event.worker)
    if member is not None and job.rounds.round is not None:
        job.rounds.round.census.take_out(member)
        member.exit_code = event.exit_code
        job.rounds.round.census.add(member)
    how = _POLITE.get(event.exit_code, rendezvous.LOST)
    if how == rendezvous.DONE and member is not None and member.attached:
        how = rendezvous.EXITED
    return _part(job, event.worker, how, now, effects)


def leave(job: Job, event: Leave, now: float, effects: Effects) -> Done:
    """A worker or an agent leaves on purpose, done or not. Raises Stale.

    An agent that may not join, because its node is bad, can end the job for the others, too.
    """
    checked = event.ending is not None and job.check.was_checked(event.incarnation)
    if not checked and not knows(job, event.incarnation):
        rendezvous.member_of(job.rounds, job.name, event.incarnation)
    if event.reason is Departure.DONE and rendezvous.knows(job.rounds, event.incarnation):
        job.finished_step = max(event.step, job.finished_step or 0)
    if event.ending is not None:
        job.ending = event.ending
        effects += [Wake(topic=topic(job.name)) for topic in (watch_topic, round_topic)]
    return _part(job, event.incarnation, event.reason.value, now, effects)


_POLITE = {0: rendezvous.DONE, REQUEUE: Departure.PREEMPTED.value}
"""Exit codes that do not count as failures."""
_DEATHS = (rendezvous.LOST, Departure.FAILED.value)
"""Departures that count as failures of the job. Of a round's members only the first counts: the break ends the others.
"""
_LOSSES = (*_DEATHS, STALLED)
"""Departures whose cause may be a held lease."""


def _part(job: Job, incarnation: str, how: str, now: float, effects: Effects) -> Done:
    if how in (rendezvous.LOST, STALLED, SLOW):
        job.replies.pop(incarnation, None)
    current = job.rounds.round
    was_broken = current is not None and current.phase is Phase.BROKEN
    broken = rendezvous.part(job.rounds, incarnation, how)
    job.failures += broken and how in _DEATHS  # counted once per round: the break ends the other members
    counts = how in _LOSSES and not (was_broken and incarnation not in job.ledgers.free)
    job_ledgers.part(job, incarnation, effects, lost=counts)
    preemption_agreement.part(job, incarnation, effects)
    task_requests.part(job, incarnation, now, effects, lost=how == rendezvous.LOST)
    role_requests.part(job, incarnation, now, effects, lost=how == rendezvous.LOST)
    check_requests.part(job, incarnation, now, effects)
    if current is not None and not job.finished and current.done == current.world_size:
        _finish(job, effects)
    _after_membership(job, now, effects, broken=broken)
    return Done()


def _finish(job: Job, effects: Effects) -> None:
    job.finished = True
    job.finished_step = job.finished_step or 0
    effects += [Wake(topic=topic(job.name)) for topic in (watch_topic, round_topic)]
    effects += finishing(job)


def tick(job: Job, event: Tick, now: float, effects: Effects) -> Done:
    """A deadline is reached: the last call may be over, leases may have expired, a persist may be due."""
    del event
    job.alarm = math.inf
    job_ledgers.expire(job, now, effects)
    task_requests.tick(job, now, effects)
    role_requests.tick(job, now, effects)
    check_requests.tick(job, now, effects)
    plan_requests.tick(job, now, effects)
    if persist_due_at(job) <= now:
        save_votes.remind(job.saves, job.settings, now)
    _after_membership(job, now, effects, broken=False)
    return Done()


def _after_membership(job: Job, now: float, effects: Effects, *, broken: bool) -> None:
    """Wake waiting requests after a break; form the next round if it is due, else set the deadline for it."""
    if broken:
        job.plan.number += 1
        effects += [Wake(topic=watch_topic(job.name)), Wake(topic=plan_topic(job.name))]
    if not job.finished and job.ending is None and rank_assignment.form(job.rounds, f"{job.name}/{job.run}", now):
        job.finished_step = None  # members that were done before must finish again
        job.offers, job.keys, job.leaving = Offers(), Keys(), Leaving()
        job.plan = Choice(number=job.plan.number)
        _forget_replies(job)
        effects.append(RoundFormed(job=job.name))
        effects += [Wake(topic=topic(job.name)) for topic in (round_topic, plan_topic, watch_topic)]
    tell_of_newcomers(job, effects)
    if not job.writes and job.settings.save_to is not None:
        effects.append(ReleaseClaims(job=job.name))
    arm(job, now, effects)
    _bound_replies(job)


def _forget_replies(job: Job) -> None:
    """Drop the stored replies of incarnations that left the job, so that their memory is O(workers)."""
    job.replies = {who: last for who, last in job.replies.items() if knows(job, who)}


def _bound_replies(job: Job) -> None:
    """Limit the stored replies if lease holders without a rank come and leave while no round forms."""
    here = len(job.ledgers.free) + (len(job.ps.incarnations) if job.ps is not None else 0)
    here += len(job.roles.incarnations) if job.roles is not None else 0
    here += len(job.rounds.seats) + (len(job.rounds.round.members) if job.rounds.round else 0)
    if len(job.replies) > 4 * here + 64:
        _forget_replies(job)
