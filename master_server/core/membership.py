"""Who comes and goes: what a job does with a join, a leave, a loss, and the time."""

from __future__ import annotations

import math

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import rounds, seating, shards
from dlrover_hooks.master.core.checkpoints import Saves, Settings
from dlrover_hooks.master.core.effects import RoundFormed, Wake, plan_topic, round_topic, watch_topic
from dlrover_hooks.master.core.events import Lost, Tick
from dlrover_hooks.master.core.job import Choice, Effects, Job, arm, finishing, knows
from dlrover_hooks.master.core.ledger import Ledgers
from dlrover_hooks.master.core.restore import Offers
from dlrover_hooks.master.core.rounds import Rounds
from dlrover_hooks.protocol import Departure, Done, Exited, Join, Joined, Leave, Phase, Secret


def join(job: Job, event: Join, now: float, effects: Effects) -> Joined:
    """An agent asks for seats, or for its old ones anew. A finished job only says so, unless it is to go on.

    Raises Stale, BadRequest.
    """
    if _starts_anew(job, event):
        rounds.check(Rounds(), event)
        _reset(job, event)
    if job.finished:
        return Joined(job=job.name, run=job.run, finished=True, finished_step=job.finished_step)
    rounds.check(job.rounds, event)
    if not job.run:  # holders without a seat came first
        job.run, job.fresh = event.proposed_run, event.fresh
    broken = any([rounds.part(job.rounds, name, rounds.LOST) for name in rounds.predecessors(job.rounds, event)])
    broken = rounds.add(job.rounds, event, now) or broken
    _after_membership(job, now, effects, broken=broken)
    return Joined(job=job.name, run=job.run)


def _starts_anew(job: Job, event: Join) -> bool:
    """The books of a finished job begin anew for whoever goes on with what storage has of it.

    `fresh` counts once per launch: there, or on a job that only dead strangers have worked on.
    """
    if job.finished:
        return event.fresh or (event.again and job.settings.save_to is not None)
    if not event.fresh:
        return False
    current, predecessors = job.rounds.round, rounds.predecessors(job.rounds, event)
    known = current is not None and event.incarnation in current.agents
    return current is not None and not known and job.standing == len(predecessors)


def _reset(job: Job, event: Join) -> None:
    """The old name, and a new run unless storage has one. Round, plan and place counters go on: they only count up."""
    number, places, seen = job.rounds.number, job.rounds.places, job.rounds.places_seen
    job.rounds = Rounds(number=number, places=places, places_seen=seen)
    job.plan = Choice(number=job.plan.number)
    job.run, job.fresh, job.attempt = event.proposed_run, event.fresh, 0
    job.settings, job.saves, job.offers, job.ledgers = Settings(), Saves(), Offers(), Ledgers()
    job.refusals, job.replies, job.restored_from, job.secret = [], {}, None, Secret()
    job.finished, job.finished_step, job.finish_written = False, None, False


def lost(job: Job, event: Lost, now: float, effects: Effects) -> Done:
    """An agent or a worker was silent for too long."""
    return _part(job, event.incarnation, rounds.LOST, now, effects)


def exited(job: Job, event: Exited, now: float, effects: Effects) -> Done:
    """A launcher saw its worker end. Raises Stale, BadRequest."""
    if event.worker in job.ledgers.free:  # its launcher has no seats either, so nobody knows it here
        return _part(job, event.worker, rounds.LOST, now, effects)
    if not rounds.knows(job.rounds, event.incarnation):
        raise Stale(f"Agent {event.incarnation!r} is no part of job {job.name!r}.", hint="Join again.")
    current = job.rounds.round
    member = current.members.get(event.worker) if current else None
    holder = member.agent if member is not None else job.rounds.seats.get(event.worker, event.incarnation)
    if holder != event.incarnation:
        raise BadRequest(f"Worker {event.worker!r} of job {job.name!r} belongs to another agent.")
    return _part(job, event.worker, rounds.LOST, now, effects)


def leave(job: Job, event: Leave, now: float, effects: Effects) -> Done:
    """A worker or an agent goes on purpose: done, or not. Raises Stale."""
    if not knows(job, event.incarnation):
        rounds.member_of(job.rounds, job.name, event.incarnation)
    if event.reason is Departure.DONE and rounds.knows(job.rounds, event.incarnation):
        job.finished_step = max(event.step, job.finished_step or 0)
    return _part(job, event.incarnation, event.reason.value, now, effects)


_DEATHS = (rounds.LOST, Departure.FAILED.value)
"""It may have died of what it held. Of a round's members only the first: the others die of the break."""


def _part(job: Job, incarnation: str, how: str, now: float, effects: Effects) -> Done:
    if how == rounds.LOST:
        job.replies.pop(incarnation, None)
    current = job.rounds.round
    was_broken = current is not None and current.phase is Phase.BROKEN
    broken = rounds.part(job.rounds, incarnation, how)
    counts = how in _DEATHS and not (was_broken and incarnation not in job.ledgers.free)
    shards.part(job, incarnation, effects, lost=counts)
    if current is not None and not job.finished and current.done == current.world_size:
        _finish(job, effects)
    _after_membership(job, now, effects, broken=broken)
    return Done()


def _finish(job: Job, effects: Effects) -> None:
    job.finished = True
    job.finished_step = job.finished_step or 0
    effects.append(Wake(topic=watch_topic(job.name)))
    effects += finishing(job)


def tick(job: Job, event: Tick, now: float, effects: Effects) -> Done:
    """Time has passed: the last call may be over, and leases."""
    del event
    job.alarm = math.inf
    shards.expire(job, now, effects)
    _after_membership(job, now, effects, broken=False)
    return Done()


def _after_membership(job: Job, now: float, effects: Effects, *, broken: bool) -> None:
    """Tell of a break; form the next round if it is time, else say when it will be."""
    if broken:
        job.plan.number += 1
        effects += [Wake(topic=watch_topic(job.name)), Wake(topic=plan_topic(job.name))]
    if seating.form(job.rounds, f"{job.name}/{job.run}", now):
        job.offers = Offers()
        job.plan = Choice(number=job.plan.number)
        _forget_replies(job)
        effects.append(RoundFormed(job=job.name))
        effects += [Wake(topic=topic(job.name)) for topic in (round_topic, plan_topic, watch_topic)]
    arm(job, now, effects)
    _bound_replies(job)


def _forget_replies(job: Job) -> None:
    """Idempotency memory is O(workers): whoever is no part of the job any more is forgotten."""
    job.replies = {who: last for who, last in job.replies.items() if knows(job, who)}


def _bound_replies(job: Job) -> None:
    """Holders without a seat come and go, and no round forms: forget those that left as soon as they are many."""
    here = len(job.ledgers.free) + len(job.rounds.seats) + (len(job.rounds.round.members) if job.rounds.round else 0)
    if len(job.replies) > 4 * here + 64:
        _forget_replies(job)
