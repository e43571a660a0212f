"""Where a round parts: members leave at one step, though each hears at another moment that somebody is preempted.

Each member promises, in its background thread, to pass no further quiet point, and says which one it passed last.
When all have, the step behind the greatest of these is where all leave: nobody has passed it, nobody can pass it
unasked, and whoever is behind it trains on until there. A promise waits for nobody's collective, so nothing can wait in
a circle.
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core.effects import Wake, parting_topic
from dlrover_hooks.master.core.job import Effects, Job, knows, seat
from dlrover_hooks.master.core.rounds.rendezvous import REJOIN
from dlrover_hooks.protocol import AwaitParting, Hold, Parting, Phase, Preempt


def preempt(job: Job, event: Preempt, now: float, effects: Effects) -> Parting:
    """A member or an agent of the round is to go; members hear of it with their next heartbeat. Raises Stale."""
    del effects
    if not knows(job, event.incarnation):
        raise Stale(f"Incarnation {event.incarnation!r} is in no round of job {job.name!r}.", hint=REJOIN)
    if not _stands(job):
        return Parting()
    leaving = job.leaving
    if event.node not in leaving.nodes:
        leaving.nodes += (event.node,)
    leaving.reason = leaving.reason or event.reason
    leaving.until = min(leaving.until, now + max(0.0, event.within_s))
    return _parting(job, now)


def hold(job: Job, event: Hold, now: float, effects: Effects) -> Parting:
    """A member promises to wait. Raises Stale for anyone else."""
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
    """A member is gone: the others need not wait for it, or will not agree any more."""
    if job.leaving.nodes and job.leaving.step is None:
        job.leaving.promised.pop(incarnation, None)
        if _stands(job):
            _decide(job, effects)
        else:
            effects.append(Wake(topic=parting_topic(job.name)))


def awaited(job: Job, request: AwaitParting) -> Parting | None:
    """What `AwaitParting` answers; None: wait. Raises Stale for who is no live member."""
    seat(job, request.incarnation)
    if job.leaving.step is not None:
        return told(job)
    return None if job.leaving.nodes and _stands(job) else Parting()


def told(job: Job) -> Parting:
    """The parting as it stands, without the time that is left."""
    leaving, current = job.leaving, job.rounds.round
    if not leaving.nodes or current is None:
        return Parting()
    return Parting(round=current.number, step=leaving.step, reason=leaving.reason, nodes=leaving.nodes)


def summons(job: Job) -> bool:
    """Do members have to promise?"""
    return bool(job.leaving.nodes) and job.leaving.step is None and _stands(job)


def _stands(job: Job) -> bool:
    current = job.rounds.round
    return current is not None and current.phase is not Phase.BROKEN and not job.finished


def _decide(job: Job, effects: Effects) -> None:
    current, leaving = job.rounds.round, job.leaving
    assert current is not None
    if leaving.step is not None or not leaving.promised or len(leaving.promised) < current.missing:
        return  # in a round that stands nobody has joined again: `missing` are all who live
    leaving.step = leaving.passed + 1
    effects.append(Wake(topic=parting_topic(job.name)))


def _parting(job: Job, now: float) -> Parting:
    return msgspec.structs.replace(told(job), left_s=max(0.0, job.leaving.until - now))
