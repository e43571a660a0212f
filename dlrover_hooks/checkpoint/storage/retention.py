"""Decides which durable generations are kept, and removes the others. No torch.

Of one run these are kept: the newest `last`; and of each span of `every_steps` optimizer steps, and of each span of
`every`, the first one saved in it. Spans are counted from step 0 and from the Unix epoch, so that the choice depends
only on the generations present, and one that was once kept for a span is kept by every later commit. The newest
complete generation is always kept, and so is one that is being read (`reading`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from dlrover_hooks.checkpoint.storage.catalog import (
    FRESH,
    GIVEN_UP,
    MANIFEST,
    AbandonedRuns,
    FreshStart,
    Listed,
    age,
    encode,
    folder,
    load,
    look,
    outlived,
)
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.checkpoint.storage.stall_guard import StallGuard
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Message, Retention

_log = logging.getLogger("dlrover_hooks")
_said = set[str]()
"""Links, and names that could not be removed: each is logged once."""
RUNS = 1000
"""Number of abandoned runs that are remembered: 35 kB."""
READER = "reading-"
READ_S = 3600.0
"""The note of a dead reader protects a generation for at most this long."""
TRIES = 5
"""Number of attempts to remove a folder that is still being written to."""


class Reader(Message, frozen=True):
    """The content of a reader's note: Unix time."""

    until: float


def kept(found: Sequence[Manifest], keep: int | Retention) -> set[Generation]:
    """The generations to keep of `found`, the complete generations of one run, in any order."""
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
    """The spans that this generation may be the first one of. Steps before the first full span are in none."""
    spans: set[tuple[str, int]] = set()
    if rules.every_steps and one.generation.step >= rules.every_steps:
        spans.add(("steps", one.generation.step // rules.every_steps))
    if rules.every_s:
        spans.add(("time", int(one.created_at // rules.every_s)))
    return spans


def condemned(rows: Iterable[Listed], job: str, run: str, keep: int | Retention) -> list[Listed]:
    """Generations of `job`'s `run` that `keep` does not keep, and folders older than its newest, never committed."""
    rows = list(rows)
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
        if (one.folder in ours and one.folder not in stays) or (not one.committed and (one.attempt, one.step) < newest)
    ]


def retain(place: StorageFolder, rows: Iterable[Listed], manifest: Manifest, keep: int | Retention) -> None:
    """After the commit of `manifest`: remove what is not kept, and all earlier runs if this run started fresh.

    `rows` (see `catalog.changes`) includes the new generation. Each folder is inspected again before it is removed. A
    failure to remove one is logged, and retried after the next commit: the generation is committed already.
    """
    rows, run = list(rows), manifest.generation.run
    with _told(place, "what an earlier run left"):
        if load(place, FRESH, FreshStart) == FreshStart(job=manifest.job, run=run) and _give_up(
            place, [one for one in rows if _is_older(one, manifest)]
        ):
            place.remove(FRESH)
    now = time.time()
    for one in condemned(rows, manifest.job, run, keep):
        _remove_if(place, one, lambda same: not (same.committed and being_read(place, same, now)))
    with _told(place, "a temporary file"):
        place.sweep()


@contextlib.contextmanager
def _told(place: StorageFolder, what: str) -> Iterator[None]:
    """Log a failure to remove `what`, once."""
    try:
        yield
    except StorageFailed as error:
        if (key := f"{place.url} {what}") not in _said:
            _said.add(key)
            _log.warning("%s: %s is not removed and takes up space: %s", place.url, what, error)


def _remove_if(place: StorageFolder, one: Listed, may: Callable[[Listed], bool]) -> bool:
    """Remove a generation if it is unchanged and `may` allows it. False: that failed, and was logged."""
    with _told(place, one.folder):
        if (now := _same(place, one)) is not None and may(now):
            remove(place, one.folder)
        return True
    return False


def _is_older(one: Listed, manifest: Manifest) -> bool:
    old = one.manifest
    return old is not None and old.job == manifest.job and old.generation.run != manifest.generation.run


def _give_up(place: StorageFolder, older: list[Listed]) -> bool:
    """Remove them and record their runs, since a remote keeper may still try to commit one of their generations.

    False: some could not be removed.
    """
    runs = {one.manifest.generation.run: None for one in older if one.manifest is not None}
    before = (load(place, GIVEN_UP, AbandonedRuns) or AbandonedRuns()).runs
    place.put(GIVEN_UP, encode(AbandonedRuns(tuple(dict.fromkeys(before) | runs)[-RUNS:])))
    return all([_remove_if(place, one, lambda _: True) for one in older])


def _same(place: StorageFolder, one: Listed) -> Listed | None:
    """The folder as it is now, if it may be removed; None if it has changed or is a symbolic link."""
    if _linked(place, one):
        return None
    now = look(place, one.folder)
    same = now.committed == one.committed and _generation(now) == _generation(one)
    return now if same and not now.unread else None


def _generation(one: Listed) -> Generation | None:
    return one.manifest.generation if one.manifest is not None else None


def _linked(place: StorageFolder, one: Listed) -> bool:
    """The folder is a symbolic link: the user keeps it elsewhere, and it is not removed. Logged once."""
    if not place.is_link(one.folder):
        return False
    if (path := place.path(one.folder)) not in _said:
        _said.add(path)
        _log.warning("%s is a link: what retention does not keep is not removed there", path)
    return True


def remove(place: StorageFolder, home: str) -> None:
    """Remove the MANIFEST of the generation in folder `home`, then its files, even if more are written meanwhile."""
    for tries in range(1, TRIES + 1):
        place.remove(f"{home}/{MANIFEST}")
        try:
            return place.remove_folder(home)
        except StorageFailed as error:
            cause = error.__cause__
            if tries == TRIES or not isinstance(cause, OSError) or cause.errno != errno.ENOTEMPTY:
                raise


def let_go(place: StorageFolder, job: str, generation: Generation) -> str | None:
    """Remove the folder of `generation` if it is obsolete and not committed; returns the reason, or None.

    Called after every write into it. A commit updates `latest` before it searches for folders to remove: so either the
    commit finds this folder, or the writer finds the new `latest`.
    """
    home, why = folder(generation), None
    with _told(place, home):
        if (why := outlived(place, job, generation)) is not None:
            now = look(place, home)
            if now.committed:
                return None
            if not _linked(place, now):
                remove(place, home)
    return why


def being_read(place: StorageFolder, one: Listed, now: float) -> bool:
    """Whether the generation is being read now (`reading`)."""
    notes = (load(place, f"{one.folder}/{name}", Reader) for name in one.names if name.startswith(READER))
    return any(note is not None and note.until > now for note in notes)


@contextlib.contextmanager
def reading(place: StorageFolder, generation: Generation) -> Iterator[None]:
    """Protect `generation` from retention, for at most `READ_S`. Without write permission there is no protection."""
    note = f"{folder(generation)}/{READER}{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.json"
    patience, data = StallGuard(), msgspec.json.encode(Reader(until=time.time() + READ_S))
    with contextlib.suppress(StorageFailed):
        patience.run(lambda _: place.put(note, data), f"write {note}")
    try:
        yield
    finally:
        with contextlib.suppress(StorageFailed):
            patience.run(lambda _: place.remove(note), f"remove {note}")
