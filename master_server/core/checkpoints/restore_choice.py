"""The restore choice: workers attach and list the images they hold; the newest complete generation is loaded by all."""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.checkpoints import replica_ring, restore_sources, save_votes
from dlrover_hooks.master.core.checkpoints.restore_sources import Neighbour
from dlrover_hooks.master.core.checkpoints.save_votes import Settings
from dlrover_hooks.master.core.effects import Wake, watch_topic
from dlrover_hooks.master.core.job import Effects, Job, arm_for_persist, enter, seat
from dlrover_hooks.master.core.leased_data import job_ledgers
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.master.core.rounds.rendezvous import Round
from dlrover_hooks.protocol import LARGEST_STEP, Attach, Attached, Done, Loaded, Phase, Restore, Source

REFUSALS = 64
"""Most refused generations that are stored."""


def attach(job: Job, event: Attach, now: float, effects: Effects) -> Attached:
    """A worker is up: store what it offers; after the last one, choose what to load. Raises Stale, BadRequest.

    Sent again after all have attached, it can only withdraw `recovers`.
    """
    current, member = seat(job, event.incarnation)
    settings = Settings(
        save_to=event.save_to.rstrip("/") if event.save_to else None,
        options=event.storage_options,
        keep=event.keep,
        save_every=event.save_every,
        persist_every=event.persist_every,
        resume=event.resume,
    )
    save_votes.check(settings)
    _check_attempts(job, event)
    if current.phase is Phase.BROKEN:
        raise Stale(f"Round {current.number} of job {job.name!r} broke before all attached.", hint="Join again.")
    if current.phase is Phase.ATTACHING:
        _offer(job, member, event, settings, first=current.attached == 0)
        if not member.attached:
            current.census.take_out(member)
            member.attached, member.pid, member.recovers = True, event.pid, event.recovers
            current.census.add(member)
            current.attached += 1
        if current.attached == current.world_size:
            _choose(job, current, now, effects)
    elif member.recovers and not event.recovers:  # the worker's training loop now ends with the round
        current.census.take_out(member)
        member.recovers = False
        current.census.add(member)
        effects.append(Wake(topic=watch_topic(job.name)))  # its agent now admits newcomers
    return Attached(run=job.run, round=current.number, rank=member.rank, world_size=current.world_size)


def _check_attempts(job: Job, event: Attach) -> None:
    """Raises BadRequest for an attempt so large that no attempt could follow it."""
    offered = (*(one.generation for one in event.held), *(one.generation for one in event.stored))
    newest = max((one.attempt for one in offered), default=0)
    if newest > LARGEST_STEP:
        raise BadRequest(
            f"{event.incarnation!r} offers a checkpoint of attempt {newest} to job {job.name!r}; the largest is "
            f"{LARGEST_STEP}.",
            hint="That checkpoint is damaged or forged: remove it, or give another save_to.",
        )


def _offer(job: Job, member: Member, event: Attach, settings: Settings, *, first: bool) -> None:
    """Store the offer: settings and storage from rank 0, the node's memory from any local rank 0."""
    if first or member.rank == 0:
        job.settings = settings
    if event.held or member.local_rank == 0:
        job.offers.held[member.node] = event.held
    if event.keeper is not None:
        job.offers.neighbours[member.node] = Neighbour(event.keeper, event.domain, event.sends)
        job.secret = job.secret if job.secret.key else event.secret
    if member.rank == 0:
        job.offers.stored, job.offers.damaged, job.offers.heard = event.stored, event.damaged, event.heard
        url = restore_sources.folder(settings.resume) if restore_sources.is_url(settings.resume) else settings.save_to
        job.offers.stored_url = url


def _choose(job: Job, current: Round, now: float, effects: Effects) -> None:
    """All members have attached: choose what to load and start the next attempt."""
    virgin = job.attempt == 0
    fresh = virgin and (job.fresh or job.settings.resume == "never")
    chosen = None if fresh else _candidate(job, current, virgin=virgin)
    whole = chosen if chosen is not None and not chosen.weights else None
    required = job.settings.resume == "require" or restore_sources.takes_weights(job.settings.resume)
    job.plan.restore = chosen
    job.plan.replicas_to = replica_ring.ring(
        {name: one.domain for name, one in job.offers.neighbours.items() if one.sends}
    )
    job.plan.holders = replica_ring.holders(job.offers, chosen)
    job.plan.answers = replica_ring.answers(job.plan.holders, current.members.values())
    job.plan.lost = _lost(job) if chosen is None and not fresh else 0
    job.plan.refused = _refusal(job) if chosen is None and required else None
    job.restored_from = chosen.source if chosen else None
    job.attempt = max(job.attempt, whole.generation.attempt if whole else 0, _heard(job, fresh=fresh)) + 1
    if job.plan.lost and not required:
        job.run = _another_run(job)
    current.attempt = job.attempt
    step = whole.generation.step if whole else 0
    complete = whole.generation if whole is not None and whole.source is not Source.STORAGE else None
    save_votes.begin(job.saves, job.settings, step, complete, now, durable=_is_durable(job, whole))
    job_ledgers.begin(job, effects)
    waits = chosen is not None or job.plan.refused is not None
    if not waits:
        job_ledgers.settle(job, effects)
    enter(job, current, Phase.RESTORING if waits else Phase.TRAINING, effects)
    arm_for_persist(job, now, effects)


def _is_durable(job: Job, whole: Restore | None) -> bool:
    """True if the state that the attempt begins with is in storage, or if it begins without a checkpoint."""
    if whole is None or whole.source is Source.STORAGE:
        return True
    kept = (*job.offers.stored, *job.saves.committed)
    return any(one.generation == whole.generation for one in kept)


def _heard(job: Job, *, fresh: bool) -> int:
    return 0 if fresh else restore_sources.newest_attempt(job.offers, job.run)


def _lost(job: Job) -> int:
    """Number of generations that exist but cannot be loaded."""
    refused = (one.generation for one in job.refusals if one.generation.run == job.run)
    return len({(one.attempt, one.step) for one in refused} | set(job.offers.damaged))


def _another_run(job: Job) -> str:
    """The new run of a job whose checkpoints could not be loaded. Retention does not delete those of the old run."""
    return f"{job.proposed[:-4]}{job.attempt % (1 << 16):04x}"


def _candidate(job: Job, current: Round, *, virgin: bool) -> Restore | None:
    ranks: dict[str, list[int]] = {}
    for member in current.members.values():
        ranks.setdefault(member.node, []).append(member.rank)
    if restore_sources.takes_weights(job.settings.resume):
        return _own(job, ranks, virgin=virgin) or _weights(job, ranks)
    elsewhere = virgin and restore_sources.is_url(job.settings.resume)
    memory = [] if elsewhere else restore_sources.in_memory(job.offers, ranks)
    candidates = memory + restore_sources.in_storage(job.offers, job.saves.committed, only_offered=elsewhere)
    if virgin:
        job.run = restore_sources.adopted_run(job.offers, candidates, job.run)
    return restore_sources.newest(candidates, job.run, job.refusals)


def _own(job: Job, ranks: dict[str, list[int]], *, virgin: bool) -> Restore | None:
    """The newest generation of the run itself, which began with weights alone; None in its first round."""
    if virgin:
        return None
    candidates = restore_sources.in_memory(job.offers, ranks) + restore_sources.in_storage(
        job.offers, job.saves.committed, only_offered=False
    )
    return restore_sources.newest(candidates, job.run, job.refusals)


def _weights(job: Job, ranks: dict[str, list[int]]) -> Restore | None:
    """The newest generation of another run, from which a new run takes its weights."""
    memory = [] if restore_sources.is_url(job.settings.resume) else restore_sources.in_memory(job.offers, ranks)
    candidates = memory + restore_sources.in_storage(job.offers, (), only_offered=True)
    others = [found for found in candidates if found.generation.run != job.run]
    found = restore_sources.newest(others, restore_sources.adopted_run(job.offers, others, job.run), job.refusals)
    return msgspec.structs.replace(found, weights=True) if found is not None else None


def _refusal(job: Job) -> str:
    where = job.offers.stored_url or "memory (no save_to is set)"
    if job.plan.lost:
        return (
            f'resume="{job.settings.resume}": none of {job.plan.lost} checkpoints of job {job.name!r} in memory and in '
            f"{where} could be loaded: {'; '.join(job.plan.fallbacks) or 'they are damaged, see the warnings above'}."
        )
    return f'resume="{job.settings.resume}": no whole generation of job {job.name!r} was found in memory or in {where}.'


def loaded(job: Job, event: Loaded, now: float, effects: Effects) -> Done:
    """A worker has loaded the choice, or cannot: then the next best one is chosen. Raises Stale, BadRequest."""
    current, member = seat(job, event.incarnation)
    if event.round != current.number or current.phase in (Phase.ATTACHING, Phase.BROKEN):
        raise Stale(
            f"Loaded for round {event.round} of job {job.name!r}, but round {current.number} is {current.phase.value}.",
            hint="Drop what was loaded and ask for the plan again.",
        )
    if current.phase is Phase.TRAINING:
        return Done()
    if not event.ok:
        _reject(job, current, member, event.reason, now, effects)
        return Done()
    if not member.loaded and not job_ledgers.hear(job, event):
        _reject(job, current, member, job_ledgers.TWICE, now, effects)
        return Done()
    current.loaded += not member.loaded
    member.loaded = True
    if current.loaded == current.world_size:
        job_ledgers.settle(job, effects)
        enter(job, current, Phase.TRAINING, effects)
        arm_for_persist(job, now, effects)
    return Done()


def _reject(job: Job, current: Round, member: Member, reason: str, now: float, effects: Effects) -> None:
    """The choice cannot be loaded: the same members form a new round without it."""
    bad = job.plan.restore
    if bad is not None:
        job.refusals.append(restore_sources.refusal(bad))
        del job.refusals[:-REFUSALS]
        text = f"{bad.generation} from {bad.source.value}: rank {member.rank}: {reason or 'no reason given'}"
        job.plan.fallbacks += (text,)
    job.rounds.number += 1
    current.renumber(job.rounds.number, f"{job.name}/{job.run}/{job.rounds.number}")
    _choose(job, current, now, effects)
