"""Reads a checkpoint tree: names, MANIFESTs, which generations are complete. Never writes. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from dlrover_hooks.checkpoint.storage.filesystem import SMALL_BYTES, StorageFolder, failures, reason
from dlrover_hooks.errors import Corrupt, StorageFailed
from dlrover_hooks.protocol import LARGEST_STEP, Generation, Manifest, Message

MANIFEST, LATEST, FINISHED = "MANIFEST.json", "latest.json", "finished.json"
FRESH, GIVEN_UP = "fresh.json", "given-up.json"
FOLDER = re.compile(r"step-(\d{10,})-(\d{4,})$")
SHARD = re.compile(r"shard-\d{5,}-model-00001-of-00001\.safetensors")
MANIFEST_BYTES = 256 << 20
"""Maximum size of a MANIFEST: the hashes of a generation of 50 TB."""
_Row = TypeVar("_Row", bound=Message)


class Note(Message, frozen=True, kw_only=True):
    """A small file about the tree. `digest`: of all other fields; empty after `decode` and in files of old versions."""

    digest: str = ""


class Latest(Note, frozen=True):
    """The content of `latest.json`."""

    job: str
    generation: Generation
    folder: str
    format: int = 1


class Finished(Note, frozen=True):
    """The content of `finished.json`."""

    job: str
    run: str
    step: int
    format: int = 1


class FreshStart(Note, frozen=True):
    """The content of `fresh.json`."""

    job: str
    run: str
    format: int = 1


class AbandonedRuns(Note, frozen=True):
    """The content of `given-up.json`: runs whose late commits are refused, the newest last."""

    runs: tuple[str, ...] = ()
    format: int = 1


class Listed(Message, frozen=True):
    """A generation's folder as found. `fault`: why it is not complete; None if it is, judged by the file sizes."""

    folder: str
    step: int
    attempt: int
    fault: str | None = None
    manifest: Manifest | None = None
    """None: there is none, or it cannot be read."""
    names: tuple[str, ...] = ()
    """Files and folders in the folder."""
    unread: bool = False
    """The MANIFEST could not be read from storage. Its run is unknown, so the folder is neither used nor removed."""
    committed: bool = False
    """The generation was committed at some time: a MANIFEST exists, or it cannot be determined whether one does."""


def folder(generation: Generation) -> str:
    """Name of a generation's folder."""
    return f"step-{generation.step:010d}-{generation.attempt:04d}"


def shard_name(rank: int) -> str:
    """Name of a rank's file, in the form that stock DCP readers expect."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def age(manifest: Manifest) -> tuple[int, int]:
    """Sort key for generations of one run."""
    return manifest.generation.attempt, manifest.generation.step


def encode(note: Note) -> bytes:
    """The bytes of a file with `note` and its digest."""
    return msgspec.json.encode(msgspec.structs.replace(note, digest=_digest(note)))


def _digest(note: Note) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(note))


def decode(data: bytes | None, row: type[_Row]) -> _Row | None:
    """`data` as `row`; None if it is absent, damaged, or does not match its digest."""
    try:
        found = msgspec.json.decode(data, type=row) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, Note) or not found.digest:
        return found
    plain = msgspec.structs.replace(found, digest="")
    return plain if _digest(plain) == found.digest else None


def content(place: StorageFolder, name: str, limit: int = SMALL_BYTES) -> bytes | None:
    """The content of file `name`; None if absent, empty if it is no regular file or too long. Raises StorageFailed."""
    try:
        return place.read(name, limit)
    except Corrupt:
        return b""


def load(place: StorageFolder, name: str, row: type[_Row]) -> _Row | None:
    """File `name` as `row`; None if absent or damaged. Raises StorageFailed."""
    return decode(content(place, name, MANIFEST_BYTES if row is Manifest else SMALL_BYTES), row)


def listing(place: StorageFolder) -> list[Listed]:
    """All generation folders by name, whatever their content. One that cannot be read does not hide the others."""
    return [look(place, name) for name in _homes(place)]


def newcomers(place: StorageFolder, rows: Iterable[Listed]) -> list[Listed]:
    """Folders that were created after `rows` were listed."""
    known = {one.folder for one in rows}
    return [look(place, name) for name in _homes(place) if name not in known]


def changes(place: StorageFolder) -> list[Listed]:
    """As `listing`, but without the MANIFESTs' files, and only new or changed MANIFESTs are read.

    For repeated commits. A folder counts as known if its names, sizes and the version of its MANIFEST are unchanged;
    MANIFESTs on back ends without versions are read again each time.
    """
    before, rows = _known.get(place.url, {}), dict[str, _Seen]()
    for name in _homes(place):
        rows[name] = _seen(place, name, before.get(name))
    _known[place.url] = {name: seen for name, seen in rows.items() if seen.what is not None}
    return [seen.row for seen in rows.values()]


class _Seen(NamedTuple):
    what: int | None
    """A hash that changes whenever the folder changes; None if changes cannot be detected."""
    row: Listed


_known: dict[str, dict[str, _Seen]] = {}
"""By URL and folder. Each folder map is replaced at once, so threads need no lock."""


def _seen(place: StorageFolder, name: str, before: _Seen | None) -> _Seen:
    try:
        entries = place.entries(name)
    except StorageFailed:
        entries = {}
    version = entries[MANIFEST].version if MANIFEST in entries else ()
    what = hash((version, frozenset((one, entry.size) for one, entry in entries.items()))) if version else None
    if before is not None and before.what == what is not None:
        return before
    row = look(place, name)
    manifest = msgspec.structs.replace(row.manifest, files=()) if row.manifest is not None else None
    return _Seen(None if row.unread else what, msgspec.structs.replace(row, manifest=manifest, names=()))


def _homes(place: StorageFolder) -> list[str]:
    """Folders named like a generation. Numbers that are too large for a step or attempt are not ours."""
    found = {name: FOLDER.match(name) for name in place.sizes()}
    return sorted(name for name, match in found.items() if match and max(int(match[1]), int(match[2])) <= LARGEST_STEP)


def look(place: StorageFolder, name: str) -> Listed:
    """The generation's folder `name` as it is now.

    The MANIFEST is read after the files were listed: if it still exists then, the list was complete.
    """
    match = FOLDER.match(name)
    assert match is not None
    found, sizes = Listed(name, int(match[1]), int(match[2])), dict[str, int]()
    try:
        sizes = place.sizes(name)
        data = place.read(f"{name}/{MANIFEST}", MANIFEST_BYTES) if MANIFEST in sizes else None
    except Corrupt as error:
        why = f"{MANIFEST} cannot be read: {error.message.rpartition(': ')[2]}"
        return msgspec.structs.replace(found, fault=why, committed=True, names=tuple(sizes))
    except StorageFailed as error:
        why = f"{MANIFEST} cannot be read: {reason(error.__cause__ or error)}"
        return msgspec.structs.replace(found, fault=why, committed=True, names=tuple(sizes), unread=True)
    if data is None:  # or it is being removed: the MANIFEST is removed first
        why = f"there is no {MANIFEST}: it was never committed"
        return msgspec.structs.replace(found, fault=why, names=tuple(sizes))
    manifest = decode(data, Manifest)
    why = fault(manifest, name, sizes)
    return msgspec.structs.replace(found, fault=why, committed=True, manifest=manifest, names=tuple(sizes))


def outlived(place: StorageFolder, job: str, generation: Generation) -> str | None:
    """Why `generation` of `job` is obsolete unless it is committed already; None if it is not obsolete.

    If it is obsolete and not committed, its folder may be removed: it can no longer be committed.
    """
    latest = load(place, LATEST, Latest)
    same_run = latest is not None and (latest.job, latest.generation.run) == (job, generation.run)
    if latest is not None and same_run and latest.generation > generation:
        newest = look(place, folder(latest.generation))
        if newest.fault is None and newest.manifest is not None and newest.manifest.generation == latest.generation:
            return f"{generation} comes too late for {place.url}: {latest.generation} is committed there"
    if generation.run in (load(place, GIVEN_UP, AbandonedRuns) or AbandonedRuns()).runs:
        return f"{generation} comes too late for {place.url}: the job has started over there"
    return None


def instead(place: StorageFolder) -> tuple[str, str]:
    """What `place` is if no generations are listed there, and a hint if the intended folder can be guessed."""
    with failures(f"look at {place.url}"):
        is_there, is_file = place.fs.exists(place.root), place.fs.isfile(place.root)
    above, _, name = place.url.rstrip("/").rpartition("/")
    if not is_there:
        return "does not exist", ""
    if FOLDER.match(name):
        return "is one generation, not a tree of them", f"give the folder above: {above}"
    if is_file:
        return "is a file, not a folder with checkpoints in it", ""
    names = sorted(name for name in place.sizes() if not name.startswith("."))
    some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return (f"holds no checkpoints, but {some}" if names else "holds nothing"), ""


def fault(manifest: Manifest | None, name: str, sizes: dict[str, int]) -> str | None:
    """Why the generation in folder `name`, with files of `sizes`, is not complete; None if it is."""
    if manifest is None or manifest.format != 1 or folder(manifest.generation) != name:
        return f"{MANIFEST} cannot be read"
    if manifest.world_size < 1 or max(manifest.generation.step, manifest.generation.attempt) > LARGEST_STEP:
        return f"{MANIFEST} is of {manifest.world_size} ranks at {manifest.generation}, which cannot be"
    if sorted(file.rank for file in manifest.files) != list(range(min(manifest.world_size, len(manifest.files) + 1))):
        return f"{MANIFEST} does not name all {manifest.world_size} ranks"
    for file in manifest.files:
        if file.name != shard_name(file.rank):
            return f"{MANIFEST} names {file.name!r}, which is no file of rank {file.rank}"
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.nbytes or file.nbytes < 1:  # -1: a folder, 0: a pipe
            return f"{file.name}: expected {file.nbytes} bytes, found {sizes[file.name]}"
    return None
