"""Which durable generations stay, and the removal of those that do not (DL-91). No torch.

Of one run stay: the newest `last`; of each span of `every_steps` optimizer steps, and of each span of `every`, the
first one saved in it. The spans are counted from step 0 and from the Unix epoch, so that the choice depends on nothing
but what is there, and what was once kept for a span is kept by every later commit. The newest whole generation always
stays, and so does what somebody reads (`reading`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

import msgspec

from dlrover_hooks.checkpoint.catalog import FRESH, MANIFEST, Fresh, Listed, age, decode, folder, listing
from dlrover_hooks.checkpoint.place import Place
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Message, Retention

READER = "reading-"
READ_S = 3600.0
"""A reader that has died is waited for so long."""


class Reader(Message, frozen=True):
    """What a reader's note holds: Unix time."""

    until: float


def kept(found: Sequence[Manifest], keep: int | Retention) -> set[Generation]:
    """What stays of `found`, the whole generations of one run, in any order."""
    rules = Retention(last=keep) if isinstance(keep, int) else keep
    oldest_first = sorted(found, key=age)
    stays = {one.generation for one in oldest_first[-max(rules.last, 1) :]}
    spans: set[tuple[str, int]] = set()
    for one in oldest_first:
        for span in _spans(one, rules) - spans:
            spans.add(span)
            stays.add(one.generation)
    return stays


def _spans(one: Manifest, rules: Retention) -> set[tuple[str, int]]:
    """The spans whose first one this may be. Steps before the first full span are in none."""
    spans: set[tuple[str, int]] = set()
    if rules.every_steps and one.generation.step >= rules.every_steps:
        spans.add(("steps", one.generation.step // rules.every_steps))
    if rules.every_s:
        spans.add(("time", int(one.created_at // rules.every_s)))
    return spans


def condemned(place: Place, job: str, run: str, keep: int | Retention) -> list[Listed]:
    """Generations of `job`'s `run` that `keep` does not keep, and folders older than its newest, never committed."""
    rows = list(listing(place))
    ours = {
        one.folder: one.manifest
        for one in rows
        if one.manifest is not None
        and one.fault is None
        and (one.manifest.job, one.manifest.generation.run) == (job, run)
    }
    stays = {folder(generation) for generation in kept(list(ours.values()), keep)}
    newest = max((age(manifest) for manifest in ours.values()), default=(-1, -1))
    return [
        one
        for one in rows
        if (one.folder in ours and one.folder not in stays)
        or (MANIFEST not in one.names and (one.attempt, one.step) < newest)
    ]


def retain(place: Place, manifest: Manifest, keep: int | Retention) -> None:
    """After the commit of `manifest`: remove what is condemned, and all runs before it if it was to start anew."""
    run = manifest.generation.run
    if decode(place.read(FRESH), Fresh) == Fresh(job=manifest.job, run=run):
        older = [one for one in listing(place) if one.manifest is not None and one.manifest.job == manifest.job]
        for one in older:
            if one.manifest is not None and one.manifest.generation.run != run:
                remove(place, one.folder)
        place.remove(FRESH)
    for one in condemned(place, manifest.job, run, keep):
        if not being_read(place, one, time.time()):
            remove(place, one.folder)
    place.sweep()


def remove(place: Place, home: str) -> None:
    """The generation in folder `home` ceases to exist, then its files do."""
    place.remove(f"{home}/{MANIFEST}")
    place.remove_folder(home)


def being_read(place: Place, one: Listed, now: float) -> bool:
    """Somebody reads it now (`reading`)."""
    notes = (decode(place.read(f"{one.folder}/{name}"), Reader) for name in one.names if name.startswith(READER))
    return any(note is not None and note.until > now for note in notes)


@contextlib.contextmanager
def reading(place: Place, generation: Generation) -> Iterator[None]:
    """Retention leaves `generation` alone meanwhile, for at most `READ_S`. Without the right to write: no promise."""
    note = f"{folder(generation)}/{READER}{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.json"
    with contextlib.suppress(StorageFailed):
        place.put(note, msgspec.json.encode(Reader(until=time.time() + READ_S)))
    try:
        yield
    finally:
        with contextlib.suppress(StorageFailed):
            place.remove(note)
