"""Votes on generations of one job (memory-complete, stored, committed), and the schedule of the next saves.

A generation becomes complete only when every rank of its world has voted, and only in the current attempt. A vote costs
O(1). The manifest is built once, when the last rank has stored its file.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from dlrover_hooks.errors import BadRequest
from dlrover_hooks.protocol import (
    LARGEST_EVERY,
    Cadence,
    Generation,
    Manifest,
    Retention,
    ShardFile,
    Unstored,
    Vote,
    Voted,
    VoteKind,
)

OPEN = 8
"""Most generations of one attempt that may be voted on at once; the oldest is dropped for another one."""
STALL = 0.035
"""CheckFreq's bound (FAST'21): saving may delay training by 3.5 %."""
FINEST_S = 1e-9
"""Shorter times are raised to this, so that quotients stay finite."""
OFTEN_S = 0.5
"""Shortest time between saves with "auto". A restart costs a multiple of it even if no step has to be repeated."""
SAMPLES = 33
"""Timings are the median of at most so many reports."""
FIRST_PERSIST_S = 60.0
"""After the first save of a run its first persist is due in this time, or in `persist_every` if that is shorter: a run
that is lost in its first minutes, as runs with a fault often are, need not begin again."""
MARGIN, MARGIN_S = 256, 2.0
"""Ranks receive `persist_from` with a delay, so it may be set ahead of them, by at most so many steps and seconds."""


class Settings(msgspec.Struct, frozen=True):
    """Where and how often this job saves, from `Attach`."""

    save_to: str | None = None
    options: dict[str, Any] = {}
    keep: int | Retention = 2
    save_every: int | str = "auto"
    persist_every: int | str = "600s"
    resume: str = "auto"


class OpenVote(msgspec.Struct):
    """A generation that is being voted on. `closed`: its commit has begun, and no more votes are counted."""

    generation: Generation
    world_size: int
    memory: list[bool] = []
    """By rank: it holds its image. `in_memory` counts these ranks."""
    stored: list[ShardFile | None] = []
    """By rank. `in_storage` counts the files. Emptied when closed."""
    in_memory: int = 0
    in_storage: int = 0
    complete: bool = False
    closed: bool = False
    hopeless: bool = False
    """A rank has passed it without a vote: it can never become complete, and `may_complete` does not list it."""


class Commit(msgspec.Struct, frozen=True):
    """A manifest that is being written to storage; issued again after a restart of the master."""

    url: str
    options: dict[str, Any]
    keep: int | Retention
    manifest: Manifest


class Kept(msgspec.Struct, frozen=True):
    """A generation this master committed."""

    generation: Generation
    world_size: int
    url: str


class CheckpointVotes(msgspec.Struct):
    """All checkpoint state of one job. `_step`s are optimizer steps of the current attempt."""

    open: list[OpenVote] = []
    """By step."""
    newest_complete: Generation | None = None
    committing: list[Commit] = []
    committed: list[Kept] = []
    newest_committed: Generation | None = None
    unstored: Unstored | None = None
    cadence: Cadence = Cadence()
    newest_step: int = 0
    passed: int = 0
    """The greatest `Vote.passed` of any rank."""
    answered: set[int] | None = None
    """Ranks that have stored, or failed to store, a generation at or past `Cadence.persist_from`: their write is over.
    None: not counted yet, or read from an older release's snapshot."""
    persisted_step: int = 0
    persisted_at: float = 0.0
    failures: int = 0
    margin: int = 1
    """How many steps ahead the next persist is announced: doubled by a failure, reduced by one by a success."""
    votes: int = 0
    commits: int = 0
    step_times: list[float] = []
    copy_times: list[float] = []


def begin(
    saves: CheckpointVotes, settings: Settings, step: int, complete: Generation | None, now: float, *, durable: bool
) -> None:
    """A new attempt starts after `step`; `complete` is the generation that is still complete in memory.

    `durable`: no part of the training so far is in memory only. Otherwise the time of the next persist does not change;
    a master that has counted no persist has one made at once. Timings of an earlier attempt are dropped: its world size
    may have been different.
    """
    saves.open = []
    saves.answered = None
    saves.newest_complete = complete
    saves.newest_step = step
    saves.passed = 0
    saves.persisted_step = min(saves.persisted_step, step)
    if durable:
        saves.persisted_step, saves.persisted_at = step, now
    saves.step_times, saves.copy_times = [], []
    every = settings.save_every if isinstance(settings.save_every, int) else 0
    saves.cadence = Cadence(every=every, begun_step=step)
    _schedule(saves, settings, now)


def vote(saves: CheckpointVotes, settings: Settings, job: str, event: Vote, now: float) -> Commit | None:
    """Count a checked vote. Returns the commit that it completes. If this raises BadRequest nothing was changed."""
    if event.kind is VoteKind.STORED and event.file is None:
        raise BadRequest(
            f"Job {job!r} rank {event.rank}: a STORED vote for {event.generation} names no file.",
            hint="Send the ShardFile that was written.",
        )
    saves.votes += 1
    _measure(saves, event)
    if saves.newest_step == 0 and isinstance(settings.persist_every, str):  # the run has begun, and nothing is durable
        due_s = min(FIRST_PERSIST_S, seconds(settings.persist_every))
        saves.persisted_at = min(saves.persisted_at, now + due_s - seconds(settings.persist_every))
    if event.generation.step < saves.cadence.begun_step:
        _begin_before(saves, event.generation.step)
    saves.newest_step = max(saves.newest_step, event.generation.step)
    if event.kind is VoteKind.REFUSED:
        saves.unstored = Unstored(generation=event.generation, rank=event.rank, reason=event.reason)
    commit = _count(saves, settings, job, event, now) if event.kind is not VoteKind.SKIPPED else None
    _answer(saves, settings, event)
    _pass_by(saves, event)
    if event.step_s > 0:
        saves.cadence = msgspec.structs.replace(saves.cadence, every=_every(saves, settings))
    _schedule(saves, settings, now)
    return commit


def _begin_before(saves: CheckpointVotes, step: int) -> None:
    """The attempt has made `step`, and so did not begin where it restored: the user gave an older checkpoint."""
    saves.newest_step, saves.persisted_step = step, min(saves.persisted_step, step)
    saves.answered = None
    saves.cadence = msgspec.structs.replace(saves.cadence, begun_step=max(step - 1, 0), persist_from=None)


def voted(saves: CheckpointVotes) -> Voted:
    """The reply to a vote."""
    return Voted(
        newest_complete=saves.newest_complete,
        newest_committed=saves.newest_committed,
        cadence=saves.cadence,
        may_complete=may_complete(saves),
    )


def may_complete(saves: CheckpointVotes) -> tuple[int, ...]:
    """Steps of generations that must be kept by the ranks that hold them: each may become the newest complete one."""
    newest = saves.newest_complete
    return tuple(
        entry.generation.step
        for entry in saves.open
        if not (entry.complete or entry.hopeless) and (newest is None or entry.generation > newest)
    )


def committed(saves: CheckpointVotes, settings: Settings, generation: Generation, now: float) -> bool:
    """The manifest of `generation` is written. Returns False if no commit of it is under way."""
    commit = _take(saves, generation)
    if commit is None:
        return False
    saves.commits += 1
    saves.committed.append(Kept(generation=generation, world_size=commit.manifest.world_size, url=commit.url))
    saves.committed.sort(key=lambda kept: kept.generation)
    del saves.committed[: -max(_last(commit.keep), 1)]  # older ones that `keep` retains are restored only on request
    saves.newest_committed = saves.committed[-1].generation
    if (start := saves.cadence.persist_from) is None or generation.step >= start:
        _persisted(saves, generation.step, now)
    _schedule(saves, settings, now)
    return True


def commit_failed(saves: CheckpointVotes, settings: Settings, generation: Generation, now: float) -> bool:
    """Storage refused the manifest: give the generation up. Returns False if no commit of it is under way."""
    if _take(saves, generation) is None:
        return False
    _give_up(saves, settings)
    return True


def persist_due_at(saves: CheckpointVotes, settings: Settings) -> float:
    """When to call `remind`; `inf`: a persist is announced, or persists are scheduled by steps, or there is no URL."""
    every = settings.persist_every
    if settings.save_to is None or saves.cadence.persist_from is not None or isinstance(every, int):
        return math.inf
    return saves.persisted_at + seconds(every)


def remind(saves: CheckpointVotes, settings: Settings, now: float) -> None:
    """Time has passed: if a persist is due, announce it now rather than at the next vote."""
    _schedule(saves, settings, now)


def _take(saves: CheckpointVotes, generation: Generation) -> Commit | None:
    for index, commit in enumerate(saves.committing):
        if commit.manifest.generation == generation:
            return saves.committing.pop(index)
    return None


def _entry(saves: CheckpointVotes, generation: Generation, world_size: int) -> OpenVote | None:
    """The open generation of that step, added if necessary; None if it is older than all that may be open."""
    step = generation.step
    for entry in saves.open:
        if entry.generation.step == step:
            return entry
    if len(saves.open) >= OPEN and step < saves.open[-OPEN + 1].generation.step:
        return None
    nothing: list[ShardFile | None] = [None] * world_size
    entry = OpenVote(generation=generation, world_size=world_size, memory=[False] * world_size, stored=nothing)
    entry.hopeless = step < saves.passed
    saves.open.append(entry)
    saves.open.sort(key=lambda one: one.generation.step)
    if len(saves.open) > OPEN:
        saves.open.pop(_least_needed(saves))
    return entry


def _least_needed(saves: CheckpointVotes) -> int:
    """Index of the oldest hopeless generation without stored files, else of the oldest that is not being made durable.

    The newest is not dropped even if hopeless: it may be the final save, which a rank could make only at a second try.
    """
    kept = _kept_for_storage(saves)
    hopeless = (
        index for index, one in enumerate(saves.open[:-1]) if one.hopeless and not one.in_storage and index != kept
    )
    return next(hopeless, 1 if kept == 0 else 0)


def _kept_for_storage(saves: CheckpointVotes) -> int | None:
    """Index of the generation that is being made durable: its write may take longer than any number of saves."""
    start = saves.cadence.persist_from
    if start is None:
        return None
    due = (index for index, one in enumerate(saves.open) if one.generation.step >= start and not one.closed)
    return next(due, None)


def _close(entry: OpenVote) -> None:
    """Stop counting votes, and drop the counted files."""
    entry.closed, entry.stored, entry.in_storage = True, [], 0


def _count_memory(
    saves: CheckpointVotes, settings: Settings, job: str, entry: OpenVote, event: Vote, now: float
) -> Commit | None:
    del settings, job, now
    entry.in_memory += not entry.memory[event.rank]
    entry.memory[event.rank] = True
    if entry.complete or entry.hopeless or entry.in_memory < entry.world_size:
        return None
    entry.complete = True
    if saves.newest_complete is None or saves.newest_complete < entry.generation:
        saves.newest_complete = entry.generation
    return None


def _count_stored(
    saves: CheckpointVotes, settings: Settings, job: str, entry: OpenVote, event: Vote, now: float
) -> Commit | None:
    assert event.file is not None
    entry.in_storage += entry.stored[event.rank] is None
    entry.stored[event.rank] = event.file
    if entry.in_storage < entry.world_size or settings.save_to is None:
        return None
    files = tuple(file for file in entry.stored if file is not None)
    manifest = Manifest(job=job, generation=entry.generation, world_size=entry.world_size, files=files, created_at=now)
    commit = Commit(url=settings.save_to, options=settings.options, keep=settings.keep, manifest=manifest)
    _close(entry)
    saves.committing.append(commit)
    return commit


def _count_failed(
    saves: CheckpointVotes, settings: Settings, job: str, entry: OpenVote, event: Vote, now: float
) -> None:
    """Remove this rank's file. Other ranks' files still count: at the end of the training this rank tries again."""
    del saves, settings, job, now
    entry.in_storage -= entry.stored[event.rank] is not None
    entry.stored[event.rank] = None


_COUNT = {
    VoteKind.MEMORY: _count_memory,
    VoteKind.STORED: _count_stored,
    VoteKind.FAILED: _count_failed,
    VoteKind.REFUSED: _count_failed,
}


def _count(saves: CheckpointVotes, settings: Settings, job: str, event: Vote, now: float) -> Commit | None:
    entry = _entry(saves, event.generation, event.world_size)
    if entry is not None and not entry.closed:
        return _COUNT[event.kind](saves, settings, job, entry, event, now)
    return None


def _answer(saves: CheckpointVotes, settings: Settings, event: Vote) -> None:
    """Count the ranks whose part of the due persist succeeded or failed. After the last one, a persist without a commit
    has failed.

    It is not failed earlier: a rank that is still writing refuses the next persist. If persists are due more often than
    one takes, the ranks would refuse alternately, and no generation would become durable.
    """
    if event.kind in (VoteKind.MEMORY, VoteKind.SKIPPED):
        return
    start = saves.cadence.persist_from
    if start is None:  # a final save, which does not depend on what is due
        if event.kind is not VoteKind.STORED:
            _give_up(saves, settings)
        return
    if event.generation.step < start:
        return
    if saves.answered is None:
        saves.answered = _stored_since(saves, start)
    saves.answered.add(event.rank)
    commits = any(commit.manifest.generation.step >= start for commit in saves.committing)
    if len(saves.answered) == event.world_size and not commits:
        _give_up(saves, settings)


def _stored_since(saves: CheckpointVotes, start: int) -> set[int]:
    """Ranks whose file of an open generation at or past `start` is counted."""
    since = (entry.stored for entry in saves.open if entry.generation.step >= start)
    return {rank for files in since for rank, file in enumerate(files) if file is not None}


def _pass_by(saves: CheckpointVotes, event: Vote) -> None:
    """Mark generations that this rank has passed without a vote: they cannot become complete and need not be kept."""
    saves.passed = max(saves.passed, event.passed)
    for entry in saves.open:
        if entry.generation.step < event.passed and not (entry.complete or entry.memory[event.rank]):
            entry.hopeless = True


def _give_up(saves: CheckpointVotes, settings: Settings) -> None:
    """A persist failed: count it and announce another one. Each failure makes later announcements earlier."""
    saves.failures += 1
    if settings.save_to is not None:
        _announce(saves, _ahead(saves))
    saves.margin = min(2 * saves.margin, MARGIN)


def _announce(saves: CheckpointVotes, start: int | None) -> None:
    """Announce that the first generation saved at or past `start` is to be persisted; None: no persist is due."""
    saves.answered = set()
    saves.cadence = msgspec.structs.replace(saves.cadence, persist_from=start)


def _ahead(saves: CheckpointVotes) -> int:
    """A step that no rank is known to have reached, far enough ahead for all ranks to receive it in time."""
    most = math.ceil(MARGIN_S / statistics.median(saves.step_times)) if saves.step_times else MARGIN
    return saves.newest_step + max(1, min(saves.margin, most))


def _persisted(saves: CheckpointVotes, step: int, now: float) -> None:
    saves.persisted_step, saves.persisted_at = max(saves.persisted_step, step), now
    saves.margin = max(1, saves.margin - 1)
    _announce(saves, None)


def _schedule(saves: CheckpointVotes, settings: Settings, now: float) -> None:
    """Set `persist_from` when a persist is due. It stays until a generation at or past it is committed or given up."""
    if settings.save_to is None or saves.cadence.persist_from is not None:
        return
    every = settings.persist_every
    if isinstance(every, int):
        start = (saves.persisted_step // every + 1) * every
        start = max(start, _ahead(saves)) if saves.margin > 1 else start
    elif now >= persist_due_at(saves, settings):
        start = _ahead(saves)
    else:
        return
    _announce(saves, start)


def _measure(saves: CheckpointVotes, event: Vote) -> None:
    for times, value in ((saves.step_times, event.step_s), (saves.copy_times, event.copy_s)):
        if value > 0:
            times.append(max(value, FINEST_S))
            del times[:-SAMPLES]


def _every(saves: CheckpointVotes, settings: Settings) -> int:
    """Steps between saves. Changed only if it is too small by a quarter, or too large by a factor of two.

    Until all ranks have received a change, some of them save other steps than the rest.
    """
    if isinstance(settings.save_every, int):
        return settings.save_every
    if not saves.step_times or (settings.save_every == "auto" and not saves.copy_times):
        return saves.cadence.every
    step_s = statistics.median(saves.step_times)
    if settings.save_every == "auto":
        apart_s = max(statistics.median(saves.copy_times) / STALL, OFTEN_S)
        wanted = math.ceil(min(apart_s / step_s, LARGEST_EVERY))
    else:
        wanted = round(min(seconds(settings.save_every) / step_s, LARGEST_EVERY))
    wanted = max(1, wanted)
    current = saves.cadence.every
    return current if current and current <= 2 * wanted and wanted <= 1.25 * current else wanted


def seconds(text: str) -> float:
    """`"90s"` as 90.0. Raises BadRequest."""
    try:
        value = float(text.removesuffix("s")) if text.endswith("s") else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BadRequest(
            f"Expected a duration such as '90s', received {text!r}.", hint="Give seconds, or steps as an int."
        )
    return value


def check(settings: Settings) -> None:
    """Raises BadRequest for invalid intervals or an invalid retention."""
    for name, value in (("save_every", settings.save_every), ("persist_every", settings.persist_every)):
        if isinstance(value, int):
            if value < 1:
                raise BadRequest(f"{name} must be at least 1 step, received {value}.")
        elif value != "auto" or name == "persist_every":
            seconds(value)
    keep = settings.keep
    if _last(keep) < 1:
        raise BadRequest(f"keep must be at least 1, received {_last(keep)}.", hint="Keep one or more generations.")
    if isinstance(keep, Retention) and keep.every is not None:
        seconds(keep.every)


def _last(keep: int | Retention) -> int:
    return keep if isinstance(keep, int) else keep.last
