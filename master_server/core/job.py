"""One job: its identity, its events, and what its members ask for.

`apply` is the only way to change a job. It validates first and mutates after, so an error leaves the state as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import checkpoints, restore, rounds
from dlrover_hooks.master.core.checkpoints import Commit, Saves, Settings
from dlrover_hooks.master.core.effects import (
    CommitGeneration,
    Deadline,
    Effect,
    RoundFormed,
    Wake,
    WriteFinished,
    plan_topic,
    round_topic,
    watch_topic,
)
from dlrover_hooks.master.core.events import CommitFailed, Committed, FinishWritten, Key, Lost, Tick
from dlrover_hooks.master.core.restore import Offers, Refusal
from dlrover_hooks.master.core.rounds import Member, Round, Rounds
from dlrover_hooks.protocol import (
    ROUTES,
    Attach,
    Attached,
    Departure,
    Done,
    Exited,
    Join,
    Joined,
    Leave,
    Loaded,
    Message,
    Phase,
    Restore,
    Source,
    Vote,
    Voted,
)

REFUSALS = 64
"""So many given-up generations are remembered."""


class Remembered(msgspec.Struct, frozen=True):
    """The last answer on one channel, as JSON. `event`: checksum of what was asked."""

    seq: int
    event: int
    reply: bytes


class Choice(msgspec.Struct):
    """The plan of the current round. `number` counts up with every change a member must hear of."""

    number: int = 0
    restore: Restore | None = None
    refused: str | None = None
    fallbacks: tuple[str, ...] = ()


class Job(msgspec.Struct):
    """All journaled state of one job."""

    name: str
    run: str
    fresh: bool = False
    attempt: int = 0
    rounds: Rounds = msgspec.field(default_factory=Rounds)
    settings: Settings = Settings()
    saves: Saves = msgspec.field(default_factory=Saves)
    offers: Offers = msgspec.field(default_factory=Offers)
    plan: Choice = msgspec.field(default_factory=Choice)
    refusals: list[Refusal] = []
    restored_from: Source | None = None
    finished: bool = False
    finished_step: int | None = None
    finish_written: bool = False
    replies: dict[str, dict[str, Remembered]] = {}
    """By incarnation and channel."""

    @property
    def live(self) -> bool:
        """Somebody holds a seat or waits for one."""
        current = self.rounds.round
        return bool(self.rounds.waiting) or (
            current is not None and any(member.live for member in current.members.values())
        )


class Outcome(msgspec.Struct, frozen=True):
    """What an event led to."""

    reply: Message
    effects: tuple[Effect, ...] = ()
    repeated: bool = False
    """The event had been applied before: nothing changed, nothing is to be journaled."""


Effects = list[Effect]
_REPLY: dict[type[Message], type[Message]] = {route.request: route.reply for route in ROUTES}


def apply(job: Job, event: Message, now: float, key: Key | None = None) -> Outcome:
    """Change `job` by one event. Raises a MasterError, then nothing was changed."""
    if key is not None and (reply := _repeated(job, event, key)) is not None:
        return Outcome(reply=reply, repeated=True)
    effects: Effects = []
    reply = _TABLE[type(event)](job, event, now, effects)
    if key is not None and (rounds.knows(job.rounds, key.incarnation) or type(event) in _FAREWELLS):
        channels = job.replies.setdefault(key.incarnation, {})
        channels[key.channel] = Remembered(seq=key.seq, event=_checksum(event), reply=msgspec.json.encode(reply))
    return Outcome(reply=reply, effects=tuple(effects))


_FAREWELLS = (Leave, Join)
"""The sender may be unknown afterwards, and may still ask again."""


def _repeated(job: Job, event: Message, key: Key) -> Message | None:
    last = job.replies.get(key.incarnation, {}).get(key.channel)
    if last is None or key.seq > last.seq:
        return None
    if key.seq == last.seq and last.event == _checksum(event):
        return msgspec.json.decode(last.reply, type=_REPLY[type(event)])
    raise Stale(
        f"Request {key.seq} of {key.incarnation!r} on channel {key.channel!r} comes after another request {last.seq}.",
        hint="Sequence numbers of a channel only count up: use one client per incarnation, or a channel for each.",
    )


def _checksum(event: Message) -> int:
    return zlib.crc32(msgspec.msgpack.encode(event))


# ---- membership -----------------------------------------------------------------------------------------------------


def _join(job: Job, event: Join, now: float, effects: Effects) -> Joined:
    if _starts_anew(job, event):
        rounds.check(Rounds(), event)
        _reset(job, event.proposed_run)
    if job.finished:
        return Joined(job=job.name, run=job.run, finished=True, finished_step=job.finished_step)
    rounds.check(job.rounds, event)
    broken = rounds.add(job.rounds, event, now)
    _after_membership(job, now, effects, broken=broken)
    return Joined(job=job.name, run=job.run)


def _starts_anew(job: Job, event: Join) -> bool:
    """`fresh` counts once per launch: on a finished job, or on one that only dead strangers have worked on."""
    if not event.fresh:
        return False
    current = job.rounds.round
    known = current is not None and event.incarnation in current.agents
    return job.finished or (current is not None and not known and not job.live)


def _reset(job: Job, run: str) -> None:
    """A new run under the old name. Round, plan and place counters go on: they only count up."""
    number, places, seen = job.rounds.number, job.rounds.places, job.rounds.places_seen
    job.rounds = Rounds(number=number, places=places, places_seen=seen)
    job.plan = Choice(number=job.plan.number)
    job.run, job.fresh, job.attempt = run, True, 0
    job.settings, job.saves, job.offers = Settings(), Saves(), Offers()
    job.refusals, job.replies, job.restored_from = [], {}, None
    job.finished, job.finished_step, job.finish_written = False, None, False


def _lost(job: Job, event: Lost, now: float, effects: Effects) -> Done:
    return _part(job, event.incarnation, rounds.LOST, now, effects)


def _exited(job: Job, event: Exited, now: float, effects: Effects) -> Done:
    if not rounds.knows(job.rounds, event.incarnation):
        raise Stale(f"Agent {event.incarnation!r} is no part of job {job.name!r}.", hint="Join again.")
    current = job.rounds.round
    member = current.members.get(event.worker) if current else None
    holder = member.agent if member is not None else job.rounds.seats.get(event.worker, event.incarnation)
    if holder != event.incarnation:
        raise BadRequest(f"Worker {event.worker!r} of job {job.name!r} belongs to another agent.")
    return _part(job, event.worker, rounds.LOST, now, effects)


def _leave(job: Job, event: Leave, now: float, effects: Effects) -> Done:
    if not rounds.knows(job.rounds, event.incarnation):
        rounds.member_of(job.rounds, job.name, event.incarnation)
    if event.reason is Departure.DONE:
        job.finished_step = max(event.step, job.finished_step or 0)
    return _part(job, event.incarnation, event.reason.value, now, effects)


def _part(job: Job, incarnation: str, how: str, now: float, effects: Effects) -> Done:
    if how == rounds.LOST:
        job.replies.pop(incarnation, None)
    broken = rounds.part(job.rounds, incarnation, how)
    current = job.rounds.round
    if current is not None and not job.finished and current.done == current.world_size:
        _finish(job, effects)
    _after_membership(job, now, effects, broken=broken)
    return Done()


def _finish(job: Job, effects: Effects) -> None:
    job.finished = True
    job.finished_step = job.finished_step or 0
    effects.append(Wake(topic=watch_topic(job.name)))
    effects += finishing(job)


def _tick(job: Job, event: Tick, now: float, effects: Effects) -> Done:
    del event
    _after_membership(job, now, effects, broken=False)
    return Done()


def _after_membership(job: Job, now: float, effects: Effects, *, broken: bool) -> None:
    """Tell of a break; form the next round if it is time, else say when it will be."""
    if broken:
        job.plan.number += 1
        effects += [Wake(topic=watch_topic(job.name)), Wake(topic=plan_topic(job.name))]
    if rounds.form(job.rounds, f"{job.name}/{job.run}", now):
        job.offers = Offers()
        job.plan = Choice(number=job.plan.number)
        _forget_replies(job)
        effects.append(RoundFormed(job=job.name))
        effects += [Wake(topic=topic(job.name)) for topic in (round_topic, plan_topic, watch_topic)]
    elif (at := rounds.due(job.rounds)) is not None and at > now:
        effects.append(Deadline(job=job.name, at=at))


def _forget_replies(job: Job) -> None:
    """Idempotency memory is O(workers): whoever is in no round any more is forgotten."""
    job.replies = {who: last for who, last in job.replies.items() if rounds.knows(job.rounds, who)}


# ---- the restore choice ---------------------------------------------------------------------------------------------


def _attach(job: Job, event: Attach, now: float, effects: Effects) -> Attached:
    current, member = _seat(job, event.incarnation)
    settings = Settings(
        save_to=event.save_to.rstrip("/") if event.save_to else None,
        options=event.storage_options,
        keep=event.keep,
        save_every=event.save_every,
        persist_every=event.persist_every,
        resume=event.resume,
    )
    checkpoints.check(settings)
    if current.phase is Phase.BROKEN:
        raise Stale(f"Round {current.number} of job {job.name!r} broke before all attached.", hint="Join again.")
    if current.phase is Phase.ATTACHING:
        _offer(job, member, event, settings, first=current.attached == 0)
        if not member.attached:
            member.attached, member.pid = True, event.pid
            current.attached += 1
        if current.attached == current.world_size:
            _choose(job, current, now, effects)
    return Attached(run=job.run, round=current.number, rank=member.rank, world_size=current.world_size)


def _seat(job: Job, incarnation: str) -> tuple[Round, Member]:
    member = rounds.member_of(job.rounds, job.name, incarnation)
    assert job.rounds.round is not None
    return job.rounds.round, member


def _offer(job: Job, member: Member, event: Attach, settings: Settings, *, first: bool) -> None:
    """Rank 0 speaks for the settings and for storage; any local rank 0 for its node's memory."""
    if first or member.rank == 0:
        job.settings = settings
    if event.held or member.local_rank == 0:
        job.offers.held[member.node] = event.held
    if member.rank == 0:
        job.offers.stored, job.offers.finished_step = event.stored, event.finished_step
        job.offers.stored_url = settings.resume if restore.is_url(settings.resume) else settings.save_to


def _choose(job: Job, current: Round, now: float, effects: Effects) -> None:
    """All seats are taken: pick what to load, start the next attempt."""
    virgin = job.attempt == 0
    fresh = virgin and (job.fresh or job.settings.resume == "never")
    if virgin and not fresh and job.offers.finished_step is not None:
        _found_finished(job, current, effects)
        return
    chosen = None if fresh else _candidate(job, current, virgin=virgin)
    job.plan.restore = chosen
    job.plan.refused = _refusal(job) if chosen is None and virgin and job.settings.resume == "require" else None
    job.restored_from = chosen.source if chosen else None
    job.attempt = max(job.attempt, chosen.generation.attempt if chosen else 0, _heard(job, fresh=fresh)) + 1
    current.attempt = job.attempt
    step = chosen.generation.step if chosen else 0
    complete = chosen.generation if chosen is not None and chosen.source is Source.MEMORY else None
    checkpoints.begin(job.saves, job.settings, step, complete, now)
    waits = chosen is not None or job.plan.refused is not None
    _enter(job, current, Phase.RESTORING if waits else Phase.TRAINING, effects)


def _heard(job: Job, *, fresh: bool) -> int:
    return 0 if fresh else restore.newest_attempt(job.offers, job.run)


def _candidate(job: Job, current: Round, *, virgin: bool) -> Restore | None:
    ranks: dict[str, list[int]] = {}
    for member in current.members.values():
        ranks.setdefault(member.node, []).append(member.rank)
    elsewhere = virgin and restore.is_url(job.settings.resume)
    memory = [] if elsewhere else restore.in_memory(job.offers, ranks)
    candidates = memory + restore.in_storage(job.offers, job.saves.committed, only_offered=elsewhere)
    if virgin:
        job.run = restore.adopted_run(job.offers, candidates, job.run)
    return restore.newest(candidates, job.run, job.refusals)


def _refusal(job: Job) -> str:
    where = job.settings.save_to or "memory (no save_to is set)"
    return f'resume="require": no whole generation of job {job.name!r} was found in memory or in {where}.'


def _found_finished(job: Job, current: Round, effects: Effects) -> None:
    """Storage remembers what this master did not know: the run is over."""
    job.finished, job.finish_written = True, True
    job.finished_step = job.offers.finished_step
    if job.offers.stored:
        job.run = restore.adopted_run(job.offers, restore.in_storage(job.offers, [], only_offered=True), job.run)
    effects.append(Wake(topic=watch_topic(job.name)))
    _enter(job, current, Phase.TRAINING, effects)


def _enter(job: Job, current: Round, phase: Phase, effects: Effects) -> None:
    current.phase = phase
    job.plan.number += 1
    effects.append(Wake(topic=plan_topic(job.name)))


def _loaded(job: Job, event: Loaded, now: float, effects: Effects) -> Done:
    current, member = _seat(job, event.incarnation)
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
    current.loaded += not member.loaded
    member.loaded = True
    if current.loaded == current.world_size:
        _enter(job, current, Phase.TRAINING, effects)
    return Done()


def _reject(job: Job, current: Round, member: Member, reason: str, now: float, effects: Effects) -> None:
    """The choice cannot be loaded: the same members form a new round without it."""
    bad = job.plan.restore
    if bad is not None:
        job.refusals.append(Refusal(generation=bad.generation, source=bad.source))
        del job.refusals[:-REFUSALS]
        text = f"{bad.generation} from {bad.source.value}: rank {member.rank} could not load it: {reason or '?'}"
        job.plan.fallbacks += (text,)
    job.rounds.number += 1
    current.renumber(job.rounds.number, f"{job.name}/{job.run}/{job.rounds.number}")
    _choose(job, current, now, effects)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _vote(job: Job, event: Vote, now: float, effects: Effects) -> Voted:
    current, member = _seat(job, event.incarnation)
    generation = event.generation
    stale = generation.run != job.run or generation.attempt != current.attempt
    if stale or current.attempt == 0 or job.finished:
        raise Stale(
            f"Vote of rank {event.rank} for {generation}, but job {job.name!r} is at attempt {job.attempt} of run "
            f"{job.run[:8]}, round {current.number} ({current.phase.value}).",
            hint="Drop this generation and follow the plan of the current round.",
        )
    if event.rank != member.rank or event.world_size != current.world_size or generation.step < 0:
        raise BadRequest(
            f"Vote as rank {event.rank} of {event.world_size} for step {generation.step}, but incarnation "
            f"{event.incarnation!r} is rank {member.rank} of {current.world_size}."
        )
    commit = checkpoints.vote(job.saves, job.settings, job.name, event, now)
    if commit is not None:
        effects.append(committing(job, commit))
    return checkpoints.voted(job.saves)


def committing(job: Job, commit: Commit) -> CommitGeneration:
    """The effect that writes this manifest."""
    return CommitGeneration(
        job=job.name, url=commit.url, options=commit.options, manifest=commit.manifest, keep=commit.keep
    )


def _committed(job: Job, event: Committed, now: float, effects: Effects) -> Done:
    del effects
    checkpoints.committed(job.saves, job.settings, event.generation, now)
    return Done()


def _commit_failed(job: Job, event: CommitFailed, now: float, effects: Effects) -> Done:
    del effects
    checkpoints.commit_failed(job.saves, job.settings, event.generation, now)
    return Done()


def _finish_written(job: Job, event: FinishWritten, now: float, effects: Effects) -> Done:
    del event, now, effects
    job.finish_written = True
    return Done()


# ---- what a new master life must take up again ----------------------------------------------------------------------


def finishing(job: Job) -> Effects:
    """The effect that writes down the end, if that is still to be done."""
    url = job.settings.save_to
    if not job.finished or job.finish_written or url is None:
        return []
    step = job.finished_step or 0
    return [WriteFinished(job=job.name, url=url, options=job.settings.options, run=job.run, step=step)]


def unfinished_effects(job: Job) -> Effects:
    """Effects whose outcome is not journaled yet."""
    effects: Effects = [committing(job, commit) for commit in job.saves.committing]
    if (at := rounds.due(job.rounds)) is not None:
        effects.append(Deadline(job=job.name, at=at))
    return effects + finishing(job)


_TABLE: dict[type[Message], Callable[[Job, Any, float, Effects], Message]] = {
    Join: _join,
    Attach: _attach,
    Loaded: _loaded,
    Exited: _exited,
    Leave: _leave,
    Vote: _vote,
    Lost: _lost,
    Tick: _tick,
    Committed: _committed,
    CommitFailed: _commit_failed,
    FinishWritten: _finish_written,
}
