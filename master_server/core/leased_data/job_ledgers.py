"""The ledgers of one job: checks for opening, taking and waiting, and rollback with the job's attempts.

A holder with a rank is a member of the round; the fence of its ledgers is the attempt, and every attempt starts from
the data state in the restored checkpoint. A *free* holder is in no round and is not rolled back with one.
"""

from __future__ import annotations

from dlrover_hooks.errors import BadRequest, Stale, UnknownDataset
from dlrover_hooks.master.core.effects import Wake, shards_topic
from dlrover_hooks.master.core.job import Effects, Job, arm, seat
from dlrover_hooks.master.core.leased_data import leases, ledger as one, partitions
from dlrover_hooks.master.core.leased_data.ledger import DatasetLedger
from dlrover_hooks.protocol import (
    AwaitShards,
    Leases,
    Ledger as Opened,
    LedgerState,
    LedgerView,
    Loaded,
    OpenLedger,
    TakeLeases,
)
from dlrover_hooks.protocol.ranges import END, Ranges

LONGEST_NAME = 200
MOST_PARTITIONS = 10_000


def open_ledger(job: Job, event: OpenLedger, now: float, effects: Effects) -> Opened:
    """Add a holder; the first one creates the ledger. Raises Stale, BadRequest."""
    _check(job, event)
    rank = None if event.free else _settled_rank(job, event)
    found = job.ledgers.named.get(event.name)
    ledger = _agreed(job, event, found)
    ends = [part for part in event.partitions if part.end not in (None, ledger.books[part.name].end)]
    for part in ends:
        one.check_end(ledger, job.name, part.name, part.end or 0)
    job.ledgers.named[event.name] = ledger
    ledger.batch, ledger.shard = event.batch_size, event.shard_size
    for part in ends:
        one.end_at(ledger, part.name, part.end or 0)
    if event.free:
        job.ledgers.free.add(event.incarnation)
    if one.admit(ledger, event.incarnation, now) or ends:
        effects.append(_wake(job, ledger))
    return Opened(fence=ledger.fence, done=job.ledgers.restored.get(event.name, {}) if rank == 0 else {})


def take(job: Job, event: TakeLeases, now: float, effects: Effects) -> Leases:
    """See `leases.take`. Raises UnknownDataset, Stale, BadRequest."""
    ledger = _ledger_of(job, event)
    reply, news = leases.take(ledger, job.name, event, now)
    if news:
        effects.append(_wake(job, ledger))
    if one.due(ledger) < job.alarm:
        arm(job, now, effects)
    return reply


def state(job: Job, request: AwaitShards) -> Leases | None:
    """The answer to `AwaitShards`; None while other holders have all that is left.

    Raises UnknownDataset, Stale, BadRequest.
    """
    ledger = _ledger_of(job, request)
    span = one.span_of(ledger, job.name, request.epoch)
    one.holder_named(ledger, job.name, request.incarnation)
    status = one.status(ledger, request.epoch, span)
    return None if status.state is LedgerState.WAITING else status


def view(job: Job, name: str) -> LedgerView:
    """The number of positions in each state. Raises UnknownDataset."""
    ledger = _named(job, name)
    doing: dict[str, int] = {}
    for lent in ledger.leases.values():
        doing[lent.holder] = min(doing.get(lent.holder, 0) + lent.hi - lent.at, END)
    books = ledger.books.values()
    todo: int | None = 0
    for part in books:
        size = partitions.left(part)
        todo = None if todo is None or size is None else min(todo + size, END)
    return LedgerView(
        fence=ledger.fence,
        done=min(sum(part.done.size for part in books), END),
        doing=dict(sorted(doing.items())),
        todo=todo,
        leases=len(ledger.leases),
        quarantined=one.quarantined(ledger, (0, None)),
    )


# ---- holders and attempts --------------------------------------------------------------------------------------------


def part(job: Job, incarnation: str, effects: Effects, *, lost: bool) -> None:
    """`incarnation` is gone, and of an agent the members that ended with it: take their leases back."""
    job.ledgers.free.discard(incarnation)
    current = job.rounds.round
    members = current.members if current else {}
    names = {incarnation, *(current.agents.get(incarnation, ()) if current else ())}
    gone = sorted(name for name in names if name not in members or not members[name].live)
    for ledger in job.ledgers.named.values():
        came_back = [one.dismiss(ledger, name, lost=lost) for name in gone]
        if any(came_back):
            effects.append(_wake(job, ledger))


def expire(job: Job, now: float, effects: Effects) -> None:
    """Take expired leases back."""
    job.ledgers.expired_at = now
    for ledger in job.ledgers.named.values():
        if one.expire(ledger, now):
            effects.append(_wake(job, ledger))


def begin(job: Job, effects: Effects) -> None:
    """An attempt begins: members of the round get no leases until the restored cut is complete."""
    job.ledgers.settled, job.ledgers.parts, job.ledgers.restored = 0, {}, {}
    effects += [_wake(job, ledger) for ledger in job.ledgers.named.values() if not ledger.free]


TWICE = "another rank's image holds the same samples, so the model has seen them twice"


def hear(job: Job, event: Loaded) -> bool:
    """Add the ranges that are in the model according to one rank's images. Raises BadRequest if they are not decodable.

    Returns False if another rank has reported one of the positions. In that case a lease expired before its worker,
    which had trained on it, acknowledged it. Another worker trained on it again, and the checkpoint was taken before
    either worker was notified.
    """
    try:
        parts = [(name, key, Ranges.decode(text)) for name, cut in event.cuts.items() for key, text in cut.items()]
    except ValueError as error:
        raise BadRequest(f"Job {job.name!r}: the cut loaded by {event.incarnation!r} is damaged: {error}") from error
    heard = job.ledgers.parts
    if any(_meets(heard.get(name, {}).get(key), ranges) for name, key, ranges in parts):
        return False
    for name, key, ranges in parts:
        heard.setdefault(name, {}).setdefault(key, Ranges()).update(ranges)
    return True


def _meets(some: Ranges | None, more: Ranges) -> bool:
    return some is not None and any(some.overlaps(lo, hi) for lo, hi in more)


def settle(job: Job, effects: Effects) -> None:
    """All members have loaded: every ledger starts from the union of their cuts, which may be empty.

    A free ledger is left unchanged unless the checkpoint contains it.
    """
    ledgers = job.ledgers
    cuts, ledgers.parts = ledgers.parts, {}
    ledgers.settled = job.attempt
    ledgers.restored = {
        name: {key: ranges.encode() for key, ranges in sorted(cut.items())} for name, cut in sorted(cuts.items())
    }
    for name, ledger in ledgers.named.items():
        if not ledger.free:
            one.roll_back(ledger, cuts.get(name, {}), job.attempt)
        elif name in cuts:
            one.roll_back(ledger, cuts[name], max(ledger.fence, job.attempt) + 1)
        else:
            continue
        effects.append(_wake(job, ledger))


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(job: Job, event: OpenLedger) -> None:
    where = f"Dataset {event.name!r} of job {job.name!r}"
    names = [part.name for part in event.partitions]
    fits = 0 < len(event.name) <= LONGEST_NAME and event.name.isprintable() and "/ledgers/" not in event.name
    if not fits or not event.incarnation:
        raise BadRequest(
            f"{where}: a ledger's name has 1 to {LONGEST_NAME} characters, all printable, and no '/ledgers/' in it, "
            f"and its holder has a name too; received holder {event.incarnation!r}."
        )
    if not 1 <= len(names) <= MOST_PARTITIONS or len(set(names)) < len(names):
        raise BadRequest(f"{where}: expected 1 to {MOST_PARTITIONS} partitions, each once, received {len(names)}.")
    if event.batch_size < 1 or event.shard_size < 0 or event.epoch_length < 0:
        raise BadRequest(
            f"{where}: expected batch_size >= 1, shard_size >= 0 and epoch_length >= 0, received {event.batch_size}, "
            f"{event.shard_size} and {event.epoch_length}."
        )
    for part in event.partitions:
        if not 0 <= part.begin <= (END if part.end is None else part.end) <= END:
            raise BadRequest(f"{where}: partition {part.name!r} is [{part.begin}, {part.end}).")
    _check_epochs(where, event)


def _check_epochs(where: str, event: OpenLedger) -> None:
    if not event.epoch_length:
        if all(part.begin == part.end for part in event.partitions):
            raise BadRequest(f"{where} is empty.", hint="There is nothing to train on: check the dataset's filter.")
        return
    first = event.partitions[0]
    whole = len(event.partitions) == 1 and first.begin == 0 and first.end and first.end % event.epoch_length == 0
    if not whole:
        raise BadRequest(
            f"{where}: with epochs of {event.epoch_length} samples there is one partition of a whole number of them, "
            f"received {len(event.partitions)}, the first [{first.begin}, {first.end}).",
            hint="An empty dataset has nothing to train on; a stream has epoch_length 0.",
        )


def _settled_rank(job: Job, event: OpenLedger) -> int:
    """The rank of a member that trains. Raises Stale for any other sender."""
    current, member = seat(job, event.incarnation)
    if not current.attempt or job.ledgers.settled != current.attempt:
        raise Stale(
            f"Dataset {event.name!r} of job {job.name!r}: what the checkpoint holds of it is not known yet, round "
            f"{current.number} is {current.phase.value}.",
            hint="Open the ledger when the plan says that training begins.",
        )
    return member.rank


def _agreed(job: Job, event: OpenLedger, found: DatasetLedger | None) -> DatasetLedger:
    """The ledger that fits the request; a different one is replaced if it is not in use. Raises BadRequest."""
    if found is None:
        return _made(job, event, found)
    same = found.fingerprint == event.fingerprint
    spans = {part.name: (part.begin, part.end) for part in event.partitions}
    alike = same and _alike(found, event, spans)
    if alike:
        return found
    if not found.holders and not any(part.done for part in found.books.values()):
        return _made(job, event, found)
    where = f"Dataset {event.name!r} of job {job.name!r}"
    if not same:
        raise BadRequest(
            f"{where} is open with fingerprint {found.fingerprint!r}, {event.incarnation!r} has {event.fingerprint!r}.",
            hint="All workers read the same samples in the same order; other data needs another name, or --fresh.",
        )
    raise BadRequest(
        f"{where} is open as {_shape(_spans(found), found)}, {event.incarnation!r} opens it as {_shape(spans, event)}.",
        hint="All workers open one dataset alike.",
    )


def _alike(found: DatasetLedger, event: OpenLedger, spans: dict[str, tuple[int, int | None]]) -> bool:
    """True for the same partitions. A stream's end may be set later; any end may change while there is no holder."""
    if found.books.keys() != spans.keys() or found.free != event.free or found.epoch_length != event.epoch_length:
        return False
    return all(
        books.begin == spans[name][0]
        and (not found.holders or None in (books.end, spans[name][1]) or books.end == spans[name][1])
        for name, books in found.books.items()
    )


def _spans(ledger: DatasetLedger) -> dict[str, tuple[int, int | None]]:
    """Begin and end of each partition, by its name."""
    return {name: (part.begin, part.end) for name, part in ledger.books.items()}


def _shape(spans: dict[str, tuple[int, int | None]], of: DatasetLedger | OpenLedger) -> str:
    some = ", ".join(f"{name!r} [{lo}, {hi})" for name, (lo, hi) in sorted(spans.items())[:4])
    return f"{len(spans)} partition(s) {some}, epochs of {of.epoch_length}, free={of.free}"


def _made(job: Job, event: OpenLedger, found: DatasetLedger | None) -> DatasetLedger:
    """A ledger that starts from the restored cut. Raises BadRequest if the cut belongs to another dataset."""
    fence = job.attempt if not event.free else found.fence if found else 1
    made = one.made(event, fence)
    made.issued = found.issued if found else 0
    texts = job.ledgers.restored.get(event.name)
    if not texts:
        return made
    cut = {key: Ranges.decode(text) for key, text in texts.items()}
    for key, ranges in cut.items():
        books = made.books.get(key)
        if books is None or (ranges and not books.begin <= ranges.lows[0] <= ranges.highs[-1] <= _end(books.end)):
            raise BadRequest(
                f"Dataset {event.name!r} of job {job.name!r}: the restored checkpoint holds positions of partition "
                f"{key!r} up to {ranges.highs[-1:]}, {event.incarnation!r} opens it as {_shape(_spans(made), event)}.",
                hint="This is another dataset, or fewer epochs of it: start over with --fresh.",
            )
    one.roll_back(made, cut, fence if not event.free else max(fence, job.attempt + 1))
    return made


def _end(end: int | None) -> int:
    return END if end is None else end


def _named(job: Job, name: str) -> DatasetLedger:
    if name not in job.ledgers.named:
        raise UnknownDataset(
            f"Job {job.name!r} has no dataset {name!r}: it was not opened here.",
            hint="Open the ledger first. This does not mean that it is finished.",
        )
    return job.ledgers.named[name]


def _ledger_of(job: Job, event: TakeLeases | AwaitShards) -> DatasetLedger:
    """The ledger, if the sender may use it with this fence. Raises UnknownDataset, Stale."""
    ledger = _named(job, event.name)
    if ledger.free:
        valid = event.incarnation in job.ledgers.free
    else:
        current, _ = seat(job, event.incarnation)
        valid = job.ledgers.settled == current.attempt == ledger.fence
    if not valid or event.fence != ledger.fence:
        raise Stale(
            f"{event.incarnation!r} works on dataset {ledger.name!r} of job {job.name!r} with fence {event.fence}, but "
            f"{'it is' if valid else 'this holder is no part of'} fence {ledger.fence}.",
            hint="Drop all leases, go back to what was restored, and open the ledger again.",
        )
    return ledger


def _wake(job: Job, ledger: DatasetLedger) -> Wake:
    return Wake(topic=shards_topic(job.name, ledger.name))
