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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dlrover_hooks.checkpoint.catalog import (
    FINISHED,
    FRESH,
    LATEST,
    MANIFEST,
    Finished,
    Fresh,
    Latest,
    age,
    decode,
    fault,
    folder,
    manifests,
    shard_name,
    whole,
)
from dlrover_hooks.checkpoint.chunks import CHUNK_BYTES, Stream, damaged
from dlrover_hooks.checkpoint.claim import Claim, Owner, holder
from dlrover_hooks.checkpoint.patience import Attempt
from dlrover_hooks.checkpoint.place import Place, absolute
from dlrover_hooks.checkpoint.retention import READER, retain
from dlrover_hooks.errors import Corrupt, SaveToBusy, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Message, Retention, ShardFile

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


class Scan(Message, frozen=True):
    """What lies at a URL for one job (or for whoever saved there last): whole generations, newest first."""

    manifests: tuple[Manifest, ...] = ()
    finished_step: int | None = None
    damaged: tuple[str, ...] = ()
    """One line for each generation or file that was passed over, with the reason."""


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
    attempt: Attempt | None = None,
) -> ShardFile:
    """Write global `rank`'s file of `job`'s `generation` from `pieces` (`nbytes` in all), hashing on the way.

    What is committed stays as it is: its file is returned instead. `attempt` counts the bytes, and may be given up.

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
    place.write(f"{home}/{name}", (attempt or Attempt()).through(_hashed(stream, pieces)), nbytes)
    found = place.sizes(home).get(name)
    if not stream.nbytes == nbytes == found:
        raise StorageFailed(
            f"{place.path(home)}/{name} of {generation}, rank {rank} of {world_size}: "
            f"expected {nbytes} bytes, wrote {stream.nbytes}, found {found}"
        )
    return ShardFile(name=name, rank=rank, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, chunks=stream.digests())


def _committed_file(place: Place, home: str, rank: int) -> ShardFile | None:
    """`rank`'s file of the whole generation in `home`. A MANIFEST of a damaged one is removed."""
    if (manifest := decode(place.read(f"{home}/{MANIFEST}"), Manifest)) is None:
        return None
    if fault(manifest, home, place.sizes(home)) is not None:
        place.remove(f"{home}/{MANIFEST}")
        return None
    return next((file for file in manifest.files if file.rank == rank), None)


def _hashed(stream: Stream, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        yield from stream.split(piece.cast("B") if piece.format != "B" or piece.ndim != 1 else piece)


def _outdate(place: Place, home: str, generation: Generation, job: str) -> None:
    """A fresh run comes to a step that an older run had saved: that one ceases to exist before it is written over."""
    old = decode(place.read(f"{home}/{MANIFEST}"), Manifest)
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
    others = [manifest for _, manifest in manifests(place) if manifest.job != job]
    if others:
        raise _occupied(place, max(others, key=age))


def _occupied(place: Place, manifest: Manifest) -> SaveToBusy:
    job = manifest.job
    return SaveToBusy(
        f"{place.url} holds step {manifest.generation.step} of job {job!r}; nothing of it is written over",
        hint=f"go on with that job (--job {job}, or DLROVER_HOOKS_JOB={job}), start it anew (--job {job} --fresh), or "
        "choose another `save_to`",
    )


def start_anew(url: str, options: Mapping[str, Any] | None, job: str, run: str) -> None:
    """`run` of `job` starts although there is something to go on with: its first commit removes the runs before it."""
    place = Place(url, options)
    if any(old.job == job and old.generation.run != run for _, old in manifests(place)):
        place.put(FRESH, msgspec.json.encode(Fresh(job=job, run=run)))


def scan(url: str, options: Mapping[str, Any] | None, job: str | None) -> Scan:
    """What `job` can be restored from: the whole generations of the run that `latest.json` names. None: of any job.

    Damaged MANIFESTs and files of wrong size are passed over and named in `damaged`. Contents are not hashed here.
    """
    place = Place(url, options)
    bad: list[str] = []
    found = [manifest for manifest in whole(place, bad) if job in (None, manifest.job)]
    found.sort(key=age, reverse=True)
    run = _current_run(place, found, job, bad)
    ended = decode(place.read(FINISHED), Finished)
    finished = ended.step if ended is not None and job in (None, ended.job) and ended.run == run else None
    return Scan(
        manifests=tuple(manifest for manifest in found if manifest.generation.run == run),
        finished_step=finished,
        damaged=tuple(bad),
    )


def _current_run(place: Place, found: list[Manifest], job: str | None, bad: list[str]) -> str | None:
    data = place.read(LATEST)
    latest = decode(data, Latest)
    if latest is not None and job in (None, latest.job):
        home = place.path(latest.folder)
        if latest.generation not in (manifest.generation for manifest in found) and home not in str(bad):
            bad.append(f"{home}: {LATEST} names {latest.generation}, which is not there")
        return latest.generation.run
    if data is not None and latest is None:
        bad.append(f"{place.path(LATEST)}: cannot be read, the run saved last is taken")
    if found:
        return max(found, key=lambda manifest: manifest.created_at).generation.run
    ended = decode(place.read(FINISHED), Finished)
    return ended.run if ended is not None and job in (None, ended.job) else None


def commit(url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
    """Make `manifest`'s generation exist, point `latest` at it, remove what `keep` does not keep. Idempotent.

    Raises:
        StorageFailed: a file is missing or short (nothing is committed then), or the tree cannot be written.
        SaveToBusy: generations of another job lie there.
    """
    place, home = Place(url, options), folder(manifest.generation)
    refuse_others(url, options, manifest.job)
    sizes = place.sizes(home)
    why = fault(manifest, home, sizes)
    if why is not None:
        raise StorageFailed(f"{manifest.generation} of job {manifest.job!r} at {place.path(home)}: {why}")
    _outdate(place, home, manifest.generation, manifest.job)
    named = {file.name for file in manifest.files} | {MANIFEST}
    for stray in set(sizes) - named:
        if not stray.startswith(READER):
            place.remove(f"{home}/{stray}")
    _make_exist(place, f"{home}/{MANIFEST}", manifest)
    _point_latest(place, manifest)
    retain(place, manifest, keep)


def _make_exist(place: Place, name: str, manifest: Manifest) -> None:
    """Write the MANIFEST. One that is there stays, and so does whoever is quicker."""
    data = place.read(name)
    if data is not None and decode(data, Manifest) is None:
        place.remove(name)
    if data is None or decode(data, Manifest) is None:
        place.put_new(name, msgspec.json.encode(manifest))
    found = decode(place.read(name), Manifest)
    if found is None or found.files != manifest.files:
        raise StorageFailed(f"{place.path(name)} is not that of {manifest.generation} of job {manifest.job!r}")


def _point_latest(place: Place, manifest: Manifest) -> None:
    now = decode(place.read(LATEST), Latest)
    new = Latest(job=manifest.job, generation=manifest.generation, folder=folder(manifest.generation))
    same_run = now is not None and now.job == new.job and now.generation.run == new.generation.run
    if now is None or not same_run or now.generation < new.generation:
        place.put(LATEST, msgspec.json.encode(new))


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
    manifest = decode(place.read(f"{home}/{MANIFEST}"), Manifest)
    if manifest is None or manifest.generation != generation:
        raise Corrupt(f"{place.path(home)}/{MANIFEST} of {generation}: missing, unreadable or of another run")
    return manifest
