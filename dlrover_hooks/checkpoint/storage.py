"""The durable checkpoint tree at `save_to`: shard files, MANIFESTs, `latest`, retention (DL-90, DL-91).

    save_to/latest.json                                 the newest committed generation
    save_to/finished.json                               the run ended at this step
    save_to/fresh.json                                  this run starts anew: its first commit removes the runs before
    save_to/step-0000000100-0000/MANIFEST.json          this generation exists
    save_to/step-0000000100-0000/shard-00001-model-00001-of-00001.safetensors

A generation exists if and only if its MANIFEST does and the sizes of its files match. Order of a commit: files,
MANIFEST, latest, retention; of a removal: MANIFEST, files. A tree is one job's: nothing here removes or writes over a
generation of another job. No torch. Functions may be called from any thread; the
writers of one tree are one job (`Claim`), its shard files one process per rank, and `commit` one process at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from dlrover_hooks.checkpoint.chunks import CHUNK_BYTES, Stream, damaged
from dlrover_hooks.checkpoint.claim import Claim, Owner, holder
from dlrover_hooks.checkpoint.place import Place, absolute
from dlrover_hooks.errors import Corrupt, SaveToBusy, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Message, ShardFile

__all__ = [
    "Claim",
    "Owner",
    "Scan",
    "absolute",
    "commit",
    "finish",
    "folder",
    "holder",
    "manifest_of",
    "probe",
    "read",
    "refuse_others",
    "scan",
    "shard_name",
    "start_anew",
    "write_shard",
]

MANIFEST, LATEST, FINISHED, FRESH = "MANIFEST.json", "latest.json", "finished.json", "fresh.json"
_FOLDER = re.compile(r"step-(\d{10,})-(\d{4,})$")
_Row = TypeVar("_Row", bound=Message)


class Latest(Message, frozen=True):
    """What `latest.json` holds."""

    job: str
    generation: Generation
    folder: str
    format: int = 1


class Finished(Message, frozen=True):
    """What `finished.json` holds."""

    job: str
    run: str
    step: int
    format: int = 1


class Fresh(Message, frozen=True):
    """What `fresh.json` holds."""

    job: str
    run: str
    format: int = 1


class Scan(Message, frozen=True):
    """What lies at a URL for one job (or for whoever saved there last): whole generations, newest first."""

    manifests: tuple[Manifest, ...] = ()
    finished_step: int | None = None
    damaged: tuple[str, ...] = ()
    """One line for each generation or file that was passed over, with the reason."""


def folder(generation: Generation) -> str:
    """Name of a generation's folder."""
    return f"step-{generation.step:010d}-{generation.attempt:04d}"


def shard_name(rank: int) -> str:
    """Name of a rank's file; the form is the one that stock DCP readers expect."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def probe(url: str, options: Mapping[str, Any] | None = None) -> None:
    """Write and remove a small file at `url`.

    Raises:
        StorageFailed: it cannot be written; says why and what to do.
    """
    place = Place(url, options)
    place.make()
    name = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    place.put(name, b"dlrover-hooks " * 586)  # two pages: a full disk takes an empty file gladly
    place.remove(name)


def write_shard(
    url: str,
    options: Mapping[str, Any] | None,
    generation: Generation,
    rank: int,
    world_size: int,
    pieces: Iterable[memoryview],
    nbytes: int,
    *,
    job: str,
) -> ShardFile:
    """Write global `rank`'s file of `job`'s `generation` from `pieces` (`nbytes` in all), hashing on the way.

    What is committed stays as it is: its file is returned instead.

    Raises:
        SaveToBusy: another job's generation lies there.
        StorageFailed: it could not be written whole. Nothing of it is visible then.
    """
    place, home = Place(url, options), folder(generation)
    place.make(home)
    _outdate(place, home, generation, job)
    if (known := _committed_file(place, home, rank)) is not None:
        return known
    stream, name = Stream(), shard_name(rank)
    place.write(f"{home}/{name}", _hashed(stream, pieces))
    found = place.sizes(home).get(name)
    if not stream.nbytes == nbytes == found:
        raise StorageFailed(
            f"{place.path(home)}/{name} of {generation}, rank {rank} of {world_size}: "
            f"expected {nbytes} bytes, wrote {stream.nbytes}, found {found}"
        )
    return ShardFile(name=name, rank=rank, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, chunks=stream.digests())


def _committed_file(place: Place, home: str, rank: int) -> ShardFile | None:
    """`rank`'s file of the whole generation in `home`. A MANIFEST of a damaged one is removed."""
    if (manifest := _decode(place.read(f"{home}/{MANIFEST}"), Manifest)) is None:
        return None
    if _fault(manifest, home, place.sizes(home)) is not None:
        place.remove(f"{home}/{MANIFEST}")
        return None
    return next((file for file in manifest.files if file.rank == rank), None)


def _hashed(stream: Stream, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        yield from stream.split(piece.cast("B") if piece.format != "B" or piece.ndim != 1 else piece)


def _outdate(place: Place, home: str, generation: Generation, job: str) -> None:
    """A fresh run comes to a step that an older run had saved: that one ceases to exist before it is written over."""
    old = _decode(place.read(f"{home}/{MANIFEST}"), Manifest)
    if old is not None and old.job != job:
        raise _occupied(place, old)
    if old is not None and old.generation != generation:
        place.remove(f"{home}/{MANIFEST}")


def refuse_others(url: str, options: Mapping[str, Any] | None, job: str) -> None:
    """Let nobody but `job` write at `url` if generations lie there.

    Raises:
        SaveToBusy: they are another job's; names it, its newest step and the ways out.
    """
    place = Place(url, options)
    others = [manifest for _, manifest in _manifests(place) if manifest.job != job]
    if others:
        raise _occupied(place, max(others, key=_age))


def _occupied(place: Place, manifest: Manifest) -> SaveToBusy:
    job = manifest.job
    return SaveToBusy(
        f"{place.url} holds step {manifest.generation.step} of job {job!r}; nothing of it is written over",
        hint=f"go on with that job (--job {job}, or DLROVER_HOOKS_JOB={job}), start it anew (--job {job} --fresh), or "
        "choose another `save_to`",
    )


def _manifests(place: Place) -> Iterator[tuple[str, Manifest]]:
    """Folder and MANIFEST of all that can be read, whether the files are whole or not."""
    for name in sorted(place.sizes()):
        if _FOLDER.match(name) and (manifest := _decode(place.read(f"{name}/{MANIFEST}"), Manifest)) is not None:
            yield name, manifest


def start_anew(url: str, options: Mapping[str, Any] | None, job: str, run: str) -> None:
    """`run` of `job` starts although there is something to go on with: its first commit removes the runs before it."""
    place = Place(url, options)
    if any(old.job == job and old.generation.run != run for _, old in _manifests(place)):
        place.put(FRESH, msgspec.json.encode(Fresh(job=job, run=run)))


def scan(url: str, options: Mapping[str, Any] | None, job: str | None) -> Scan:
    """What `job` can be restored from: the whole generations of the run that `latest.json` names. None: of any job.

    Damaged MANIFESTs and files of wrong size are passed over and named in `damaged`. Contents are not hashed here.
    """
    place = Place(url, options)
    bad: list[str] = []
    found = [manifest for manifest in _whole(place, bad) if job in (None, manifest.job)]
    found.sort(key=_age, reverse=True)
    run = _current_run(place, found, job, bad)
    ended = _decode(place.read(FINISHED), Finished)
    finished = ended.step if ended is not None and job in (None, ended.job) and ended.run == run else None
    return Scan(
        manifests=tuple(manifest for manifest in found if manifest.generation.run == run),
        finished_step=finished,
        damaged=tuple(bad),
    )


def _current_run(place: Place, found: list[Manifest], job: str | None, bad: list[str]) -> str | None:
    data = place.read(LATEST)
    latest = _decode(data, Latest)
    if latest is not None and job in (None, latest.job):
        return latest.generation.run
    if data is not None and latest is None:
        bad.append(f"{place.path(LATEST)}: cannot be read, the run saved last is taken")
    if found:
        return max(found, key=lambda manifest: manifest.created_at).generation.run
    ended = _decode(place.read(FINISHED), Finished)
    return ended.run if ended is not None and job in (None, ended.job) else None


def _whole(place: Place, bad: list[str]) -> Iterator[Manifest]:
    for name in sorted(place.sizes()):
        if not _FOLDER.match(name):
            continue
        sizes = place.sizes(name)
        if MANIFEST not in sizes:
            continue
        manifest = _decode(place.read(f"{name}/{MANIFEST}"), Manifest)
        fault = _fault(manifest, name, sizes)
        if manifest is not None and fault is None:
            yield manifest
        else:
            bad.append(f"{place.path(name)}: {fault}")


def _fault(manifest: Manifest | None, name: str, sizes: dict[str, int]) -> str | None:
    if manifest is None or manifest.format != 1 or folder(manifest.generation) != name:
        return f"{MANIFEST} cannot be read"
    if sorted(file.rank for file in manifest.files) != list(range(min(manifest.world_size, len(manifest.files) + 1))):
        return f"{MANIFEST} does not name all {manifest.world_size} ranks"
    for file in manifest.files:
        if file.name != shard_name(file.rank):
            return f"{MANIFEST} names {file.name!r}, which is no file of rank {file.rank}"
        if sizes.get(file.name) != file.nbytes:
            return f"{file.name}: expected {file.nbytes} bytes, found {sizes.get(file.name)}"
    return None


def commit(url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int) -> None:
    """Make `manifest`'s generation exist, point `latest` at it, keep the newest `keep` of its run. Idempotent.

    Raises:
        StorageFailed: a file is missing or short (nothing is committed then), or the tree cannot be written.
        SaveToBusy: generations of another job lie there.
    """
    place, home = Place(url, options), folder(manifest.generation)
    refuse_others(url, options, manifest.job)
    sizes = place.sizes(home)
    fault = _fault(manifest, home, sizes)
    if fault is not None:
        raise StorageFailed(f"{manifest.generation} of job {manifest.job!r} at {place.path(home)}: {fault}")
    _outdate(place, home, manifest.generation, manifest.job)
    named = {file.name for file in manifest.files} | {MANIFEST}
    for stray in set(sizes) - named:
        place.remove(f"{home}/{stray}")
    if _decode(place.read(f"{home}/{MANIFEST}"), Manifest) is None:
        place.put(f"{home}/{MANIFEST}", msgspec.json.encode(manifest))
    _point_latest(place, manifest)
    _retain(place, manifest, max(keep, 1))


def _point_latest(place: Place, manifest: Manifest) -> None:
    now = _decode(place.read(LATEST), Latest)
    new = Latest(job=manifest.job, generation=manifest.generation, folder=folder(manifest.generation))
    same_run = now is not None and now.job == new.job and now.generation.run == new.generation.run
    if now is None or not same_run or now.generation < new.generation:
        place.put(LATEST, msgspec.json.encode(new))


def _retain(place: Place, manifest: Manifest, keep: int) -> None:
    """Remove this run's generations past the newest `keep`, and older folders that were never committed.

    All of the runs before it, too, if it was to start anew.
    """
    run = manifest.generation.run
    if _decode(place.read(FRESH), Fresh) == Fresh(job=manifest.job, run=run):
        for name, old in _manifests(place):
            if old.job == manifest.job and old.generation.run != run:
                _remove(place, name)
        place.remove(FRESH)
    whole = [one for one in _whole(place, []) if (one.job, one.generation.run) == (manifest.job, run)]
    whole.sort(key=_age, reverse=True)
    newest = whole[0].generation if whole else manifest.generation
    for old in whole[keep:]:
        _remove(place, folder(old.generation))
    for name in place.sizes():
        match = _FOLDER.match(name)
        older = match is not None and (int(match[2]), int(match[1])) < (newest.attempt, newest.step)
        if older and MANIFEST not in place.sizes(name):
            _remove(place, name)


def _remove(place: Place, home: str) -> None:
    place.remove(f"{home}/{MANIFEST}")
    place.remove_folder(home)


def finish(url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
    """Remember that `run` of `job` ended at `step`, so that a later start does not train again."""
    place = Place(url, options)
    place.make()
    place.put(FINISHED, msgspec.json.encode(Finished(job=job, run=run, step=step)))


def read(url: str, options: Mapping[str, Any] | None, manifest: Manifest, rank: int) -> memoryview:
    """Saved `rank`'s whole file, every chunk verified, in memory of its own (writable, not shared).

    Raises:
        Corrupt: size or hash is wrong; names file, chunk and generation.
        StorageFailed: it cannot be read.
    """
    place, generation = Place(url, options), manifest.generation
    file = next((one for one in manifest.files if one.rank == rank), None)
    if file is None:
        raise Corrupt(f"{generation} at {place.url} has no file of rank {rank}")
    name = f"{folder(generation)}/{file.name}"
    size = place.sizes(folder(generation)).get(file.name)
    if size is None:
        raise StorageFailed(f"cannot read {place.path(name)} of {generation}: No such file")
    if size != file.nbytes or file.name != shard_name(rank):  # before memory is taken for what may be a lie
        raise Corrupt(f"{place.path(name)} of {generation}: expected {file.nbytes} bytes, found {size}")
    buffer = memoryview(bytearray(file.nbytes))
    got = place.fill(name, buffer)
    if got != file.nbytes:
        found = f"{got}" if got < file.nbytes else f"more than {file.nbytes}"
        raise Corrupt(f"{place.path(name)} of {generation}: expected {file.nbytes} bytes, found {found}")
    if file.chunk_bytes != CHUNK_BYTES:
        raise Corrupt(f"{place.path(name)} of {generation}: hashed in chunks of {file.chunk_bytes}, not {CHUNK_BYTES}")
    chunk = damaged(buffer, file.chunks)
    if chunk is not None:
        raise Corrupt(f"{place.path(name)} of {generation}: chunk {chunk} does not match its hash")
    return buffer


def manifest_of(url: str, options: Mapping[str, Any] | None, generation: Generation) -> Manifest:
    """The MANIFEST of `generation`.

    Raises:
        Corrupt: there is none, it cannot be read, or it is another run's.
    """
    place = Place(url, options)
    home = folder(generation)
    manifest = _decode(place.read(f"{home}/{MANIFEST}"), Manifest)
    if manifest is None or manifest.generation != generation:
        raise Corrupt(f"{place.path(home)}/{MANIFEST} of {generation}: missing, unreadable or of another run")
    return manifest


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.generation.attempt, manifest.generation.step


def _decode(data: bytes | None, row: type[_Row]) -> _Row | None:
    """`data` as `row`; None if absent or damaged."""
    try:
        return msgspec.json.decode(data, type=row) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
