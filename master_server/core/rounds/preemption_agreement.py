"""Agreement on the step at which all members leave after a preemption, whose notice reaches them at different times.

Each member promises, in its background thread, to pass no further step boundary, and reports the last one it passed.
When all have promised, all leave at the step after the greatest reported one. No member has passed that step or can
pass it without the master's approval; members behind it train until they reach it. A promise does not wait for any
collective operation, so there is no deadlock.
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core.effects import Wake, parting_topic, watch_topic
from dlrover_hooks.master.core.job import Effects, Job, knows, seat
from dlrover_hooks.master.core.rounds.rendezvous import REJOIN
from dlrover_hooks.protocol import AwaitParting, Hold, Parting, Phase, Preempt


def preempt(job: Job, event: Preempt, now: float, effects: Effects) -> Parting:
    """A node of the round is preempted. Members are notified on their liveness connections, and in the reply to their
    next heartbeat. Raises Stale, unless the job is planned: what starts its nodes is no member.
    """
    if job.scaling is None and not knows(job, event.incarnation):
        raise Stale(f"Incarnation {event.incarnation!r} is in no round of job {job.name!r}.", hint=REJOIN)
    if not _stands(job):
        return Parting()
    leaving, before = job.leaving, summons(job)
    if event.node not in leaving.nodes:
        leaving.nodes += (event.node,)
    leaving.reason = leaving.reason or event.reason
    leaving.until = min(leaving.until, now + max(0.0, event.within_s))
    if summons(job) and not before:
        effects.append(Wake(topic=watch_topic(job.name)))
    return _parting(job, now)


def hold(job: Job, event: Hold, now: float, effects: Effects) -> Parting:
    """A member promises to wait. Raises Stale if the sender is no live member."""
    _, member = seat(job, event.incarnation)
    leaving = job.leaving
    if not leaving.nodes or (leaving.step is None and not _stands(job)):
        return Parting()
    if leaving.step is None and member.incarnation not in leaving.promised:
        leaving.promised[member.incarnation] = event.passed
        leaving.passed = max(leaving.passed, event.passed)
        _decide(job, effects)
    return _parting(job, now)


def part(job: Job, incarnation: str, effects: Effects) -> None:
    """A member is gone. If the round still stands its promise is no longer needed, else no step can be agreed."""
    if job.leaving.nodes and job.leaving.step is None:
        job.leaving.promised.pop(incarnation, None)
        if _stands(job):
            _decide(job, effects)
        else:
            effects.append(Wake(topic=parting_topic(job.name)))


def awaited(job: Job, request: AwaitParting) -> Parting | None:
    """The answer to `AwaitParting`; None: wait. Raises Stale if the sender is no live member."""
    seat(job, request.incarnation)
    if job.leaving.step is not None:
        return told(job)
    return None if job.leaving.nodes and _stands(job) else Parting()


def told(job: Job) -> Parting:
    """The current state of the agreement, without the remaining time."""
    leaving, current = job.leaving, job.rounds.round
    if not leaving.nodes or current is None:
        return Parting()
    return Parting(round=current.number, step=leaving.step, reason=leaving.reason, nodes=leaving.nodes)


def summons(job: Job) -> bool:
    """True if members are requested to promise."""
    return bool(job.leaving.nodes) and job.leaving.step is None and _stands(job)


def _stands(job: Job) -> bool:
    current = job.rounds.round
    return current is not None and current.phase is not Phase.BROKEN and not job.finished


def _decide(job: Job, effects: Effects) -> None:
    current, leaving = job.rounds.round, job.leaving
    assert current is not None
    if leaving.step is not None or not leaving.promised or len(leaving.promised) < current.missing:
        return  # no member of an unbroken round has joined again: `missing` counts all live members
    leaving.step = leaving.passed + 1
    effects.append(Wake(topic=parting_topic(job.name)))


def _parting(job: Job, now: float) -> Parting:
    return msgspec.structs.replace(told(job), left_s=max(0.0, job.leaving.until - now))
