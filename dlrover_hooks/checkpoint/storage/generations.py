"""The durable checkpoint tree at `save_to`: shard files, MANIFESTs, `latest`, retention.

    save_to/latest.json                                 the newest committed generation
    save_to/finished.json                               the run ended at this step
        save_to/fresh.json                                  a fresh run: its first commit removes the runs before it
        save_to/given-up.json                               removed runs: their late commits are refused
    save_to/step-0000000100-0000/MANIFEST.json          this generation exists
    save_to/step-0000000100-0000/shard-00001-model-00001-of-00001.safetensors

A generation exists if and only if its MANIFEST does and the sizes of its files match. Order of a commit: files,
MANIFEST, latest, retention; of a removal: MANIFEST, files. A generation that is older than `latest` and has no MANIFEST
can no longer be committed: its folder is removed by the commit, or by a process that still writes there (`let_go`). A
tree belongs to one job: nothing here removes or overwrites a generation of another job. No torch. Functions may be
called from any thread. A tree is written by one job (`UrlClaim`), its shard files by one process per rank, and `commit`
is called by one process at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, ChecksumStream
from dlrover_hooks.checkpoint.storage import mounts
from dlrover_hooks.checkpoint.storage.catalog import (
    FINISHED,
    FRESH,
    GIVEN_UP,
    LATEST,
    MANIFEST,
    MANIFEST_BYTES,
    SHARD,
    AbandonedRuns,
    Finished,
    FreshStart,
    Latest,
    Listed,
    age,
    changes,
    content,
    decode,
    encode,
    fault,
    folder,
    listing,
    load,
    newcomers,
    outlived,
    shard_name,
)
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder, absolute, is_part
from dlrover_hooks.checkpoint.storage.retention import let_go, retain
from dlrover_hooks.checkpoint.storage.stall_guard import Attempt
from dlrover_hooks.checkpoint.storage.url_claim import Owner, holder
from dlrover_hooks.errors import Corrupt, SaveToBusy, Stale, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Message, Retention, ShardFile

_log = logging.getLogger("dlrover_hooks")
LOOKS = 10
"""How often a tree is listed at most if generations are committed meanwhile."""

__all__ = [
    "Owner",
    "Scan",
    "absolute",
    "commit",
    "finish",
    "folder",
    "holder",
    "manifest_of",
    "probe",
    "refuse_given_up",
    "refuse_others",
    "scan",
    "shard_name",
    "start_anew",
    "write_shard",
]


class Scan(Message, frozen=True):
    """The complete generations at a URL, newest first, of one job (or of the job that saved there last)."""

    manifests: tuple[Manifest, ...] = ()
    finished_step: int | None = None
    damaged: tuple[str, ...] = ()
    """One line for each generation or file that was skipped, with the reason."""
    lost: tuple[tuple[int, int], ...] = ()
    """Attempt and step of the generations among them."""
    heard: int = 0
    """The greatest attempt of any folder, complete or not, of any run."""


def probe(url: str, options: Mapping[str, Any] | None = None) -> None:
    """Write and remove a small file at `url`.

    Raises:
        StorageFailed: it cannot be written; contains the reason and a hint.
    """
    place = StorageFolder(url, options)
    place.make()
    name = f".probe-{os.urandom(4).hex()}.{os.getpid()}-0.tmp"  # swept if this process is killed
    place.put(name, b"dlrover-hooks " * 586)  # two pages: a full disk accepts an empty file
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
    """Write global `rank`'s file of `job`'s `generation` from `pieces` (`nbytes` in all), and hash it meanwhile.

    A committed generation is not changed: its file is returned instead. `attempt` counts the bytes, and may be
    abandoned.

    Raises:
        SaveToBusy: another job's generation is there.
        Stale: a newer generation is committed, or the job was restarted fresh. Nothing of this one is left.
        StorageFailed: it could not be written completely. Nothing of it is visible then.
    """
    place, home = StorageFolder(url, options), folder(generation)
    mounts.demand_same(place)
    if (why := outlived(place, job, generation)) is not None:
        old = load(place, f"{home}/{MANIFEST}", Manifest)
        files = old.files if old is not None and (old.job, old.generation) == (job, generation) else ()
        if known := [file for file in files if file.rank == rank]:
            return known[0]
        raise Stale(why)
    try:
        return _write_shard(place, generation, rank, world_size, pieces, nbytes, job, attempt or Attempt())
    finally:
        if (why := let_go(place, job, generation)) is not None:
            raise Stale(why)


def _write_shard(
    place: StorageFolder,
    generation: Generation,
    rank: int,
    world_size: int,
    pieces: Iterable[memoryview],
    nbytes: int,
    job: str,
    attempt: Attempt,
) -> ShardFile:
    home = folder(generation)
    place.make(home)
    _outdate(place, home, generation, job)
    if (known := _committed_file(place, home, rank)) is not None:
        return known
    stream, name = ChecksumStream(), shard_name(rank)
    place.write(f"{home}/{name}", attempt.through(_hashed(stream, pieces)), nbytes)
    found = place.sizes(home).get(name)
    if not stream.nbytes == nbytes == found:
        raise StorageFailed(
            f"{place.path(home)}/{name} of {generation}, rank {rank} of {world_size}: "
            f"expected {nbytes} bytes, wrote {stream.nbytes}, found {found}"
        )
    return ShardFile(name=name, rank=rank, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, chunks=stream.digests())


def _committed_file(place: StorageFolder, home: str, rank: int) -> ShardFile | None:
    """`rank`'s file of the complete generation in `home`. The MANIFEST of a damaged one is removed."""
    if (manifest := load(place, f"{home}/{MANIFEST}", Manifest)) is None:
        return None
    if fault(manifest, home, place.sizes(home)) is not None:
        place.remove(f"{home}/{MANIFEST}")
        return None
    return next((file for file in manifest.files if file.rank == rank), None)


def _hashed(stream: ChecksumStream, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        yield from stream.split(piece.cast("B") if piece.format != "B" or piece.ndim != 1 else piece)


def _outdate(place: StorageFolder, home: str, generation: Generation, job: str) -> None:
    """Remove the MANIFEST of an older run's generation at this step, before its files are overwritten."""
    old = load(place, f"{home}/{MANIFEST}", Manifest)
    if old is not None and old.job != job:
        raise _occupied(place, old)
    if old is not None and old.generation != generation:
        place.remove(f"{home}/{MANIFEST}")


def refuse_others(url: str, options: Mapping[str, Any] | None, job: str) -> None:
    """Refuse to write at `url` if generations of a job other than `job` are there.

    A generation that cannot be read is assumed to be the job's own if others of this job are there; otherwise a warning
    is logged. It is not overwritten: a file of the same step is refused until its MANIFEST can be read.

    Raises:
        SaveToBusy: another job's are there; names that job, its newest step and the remedies.
    """
    place = StorageFolder(url, options)
    rows = listing(place)
    _refuse_others(place, rows, job)
    if not any(one.manifest for one in rows):
        for one in rows:
            if one.unread:
                _log.warning(
                    "job %s: %s: %s. Whose it is is not known: it stays", job, place.path(one.folder), one.fault
                )


def _refuse_others(place: StorageFolder, rows: Iterable[Listed], job: str) -> None:
    others = [one.manifest for one in rows if one.manifest is not None and one.manifest.job != job]
    if others:
        raise _occupied(place, max(others, key=age))


def refuse_given_up(url: str, options: Mapping[str, Any] | None, generation: Generation) -> None:
    """Refuse to commit a generation of a run that was abandoned for a fresh one.

    Raises:
        Stale: `generation` is of such a run.
    """
    place = StorageFolder(url, options)
    if generation.run in _given_up(place):
        raise Stale(
            f"{generation} comes too late for {place.url}: the job has started over there, and its older runs are gone"
        )


def _given_up(place: StorageFolder) -> tuple[str, ...]:
    return (load(place, GIVEN_UP, AbandonedRuns) or AbandonedRuns()).runs


def _occupied(place: StorageFolder, manifest: Manifest) -> SaveToBusy:
    job = manifest.job
    return SaveToBusy(
        f"{place.url} holds step {manifest.generation.step} of job {job!r}; nothing of it is written over",
        hint=f"go on with that job (--job {job}, or DLROVER_HOOKS_JOB={job}), start it over (--job {job} --fresh), or "
        "choose another `save_to`",
    )


def start_anew(url: str, options: Mapping[str, Any] | None, job: str, run: str) -> None:
    """Record that `run` of `job` starts fresh although there are older runs: its first commit removes them."""
    place = StorageFolder(url, options)
    found = [one.manifest for one in listing(place) if one.manifest is not None]
    if any(old.job == job and old.generation.run != run for old in found):
        place.put(FRESH, encode(FreshStart(job=job, run=run)))


def scan(url: str, options: Mapping[str, Any] | None, job: str | None) -> Scan:
    """What `job` can be restored from: the complete generations of the run in `latest.json`. None: of any job.

    Damaged MANIFESTs and files of wrong size are skipped and listed in `damaged`; so are MANIFESTs that storage fails
    to return twice. Contents are not hashed here.

    Raises:
        StorageFailed: nothing can be listed, or no generation is usable and a MANIFEST could not be read.
    """
    place, rows, latest = _look_twice(url, options)
    lost = [one for one in rows if one.committed and one.fault is not None]
    bad = [f"{place.path(one.folder)}: {one.fault}" for one in lost]
    gone = _given_up(place)
    found = [one.manifest for one in rows if one.manifest is not None and one.fault is None]
    found = [one for one in found if job in (None, one.job) and one.generation.run not in gone]
    found.sort(key=age, reverse=True)
    if not found and any(one.unread for one in lost):  # never silently train from step 0 instead
        raise StorageFailed("; ".join(bad), hint="let this user read them, or remove what is beyond repair")
    known = {one.manifest.generation.run for one in rows if one.manifest is not None}
    run = _current_run(place, latest, found, job, known, gone, bad)
    ended = load(place, FINISHED, Finished)
    finished = ended.step if ended is not None and job in (None, ended.job) and ended.run == run else None
    return Scan(
        manifests=tuple(manifest for manifest in found if manifest.generation.run == run),
        finished_step=finished,
        damaged=tuple(bad),
        lost=tuple((one.attempt, one.step) for one in lost),
        heard=max((row.attempt for row in rows), default=0),
    )


def _look_twice(url: str, options: Mapping[str, Any] | None) -> tuple[StorageFolder, list[Listed], bytes | None]:
    """List twice if something could not be read, with the file system opened again: credentials may have expired."""
    place = StorageFolder(url, options)
    rows, latest = _at_rest(place)
    if any(one.unread for one in rows):
        place = StorageFolder(url, options)
        rows, latest = _at_rest(place)
    return place, rows, latest


def _at_rest(place: StorageFolder) -> tuple[list[Listed], bytes | None]:
    """A listing and the content of `latest.json`, with no commit in between, unless commits are very frequent."""
    latest, rows = content(place, LATEST), list[Listed]()
    for _ in range(LOOKS):
        rows, before = listing(place), latest
        if (latest := content(place, LATEST)) == before:
            break
    return rows, latest


def _current_run(
    place: StorageFolder,
    data: bytes | None,
    found: list[Manifest],
    job: str | None,
    known: Collection[str],
    gone: Collection[str],
    bad: list[str],
) -> str | None:
    """The run in `latest` (`data`) if anything of it exists (`known`); otherwise the run that was saved last."""
    latest = decode(data, Latest)
    ended = load(place, FINISHED, Finished)
    ended = ended if ended is not None and job in (None, ended.job) else None
    newest = max(found, key=lambda manifest: manifest.created_at).generation if found else None
    instead = f"{newest} is the newest generation that is whole: its run is taken" if newest else ""
    if latest is not None and job in (None, latest.job) and latest.generation.run not in gone:
        home, run = place.path(latest.folder), latest.generation.run
        if latest.generation not in (manifest.generation for manifest in found) and home not in str(bad):
            bad.append(f"{home}: {LATEST} names {latest.generation}, which is not there")
        if run in known or (ended is not None and ended.run == run):
            return run
        if newest:
            bad.append(f"{place.path(LATEST)}: names a run of which nothing is there; {instead}")
    elif data is not None and latest is None:
        bad.append(
            f"{place.path(LATEST)}: cannot be read, or does not match its hash; {instead or 'no generation is whole'}"
        )
    return newest.run if newest else ended.run if ended else None


def commit(url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
    """Commit `manifest`'s generation, point `latest` at it, remove what `keep` does not keep. Idempotent.

    Raises:
        StorageFailed: a file is missing or short (nothing is committed then), or the tree cannot be written.
        SaveToBusy: generations of another job are there.
        Stale: the job was restarted fresh with another run, or a newer generation is committed and this one is not.
    """
    place, home = StorageFolder(url, options), folder(manifest.generation)
    mounts.demand_same(place)
    rows = changes(place)
    _refuse_others(place, rows, manifest.job)
    refuse_given_up(url, options, manifest.generation)
    if (why := let_go(place, manifest.job, manifest.generation)) is not None:
        raise Stale(why)
    sizes = place.sizes(home)
    why = fault(manifest, home, sizes)
    if why is not None:
        raise StorageFailed(f"{manifest.generation} of job {manifest.job!r} at {place.path(home)}: {why}")
    _outdate(place, home, manifest.generation, manifest.job)
    _remove_strays(place, home, sizes, {file.name for file in manifest.files})
    _make_exist(place, f"{home}/{MANIFEST}", manifest)
    _point_latest(place, manifest)
    this = Listed(home, manifest.generation.step, manifest.generation.attempt, manifest=manifest, committed=True)
    rows = [one for one in rows if one.folder != home]
    retain(place, [*rows, *newcomers(place, [*rows, this]), this], manifest, keep)


def _remove_strays(place: StorageFolder, home: str, sizes: Mapping[str, int], named: Collection[str]) -> None:
    """Remove our own files that the MANIFEST does not name: of ranks of a larger world, or unfinished.

    Other files and folders stay: they are not ours (some file servers put files into every folder).
    """
    for name, size in sizes.items():
        ours = SHARD.fullmatch(name) is not None or is_part(name)
        if ours and size >= 0 and name not in named:
            place.remove(f"{home}/{name}")


def _make_exist(place: StorageFolder, name: str, manifest: Manifest) -> None:
    """Write the MANIFEST. An existing one stays, also one that another process wrote first."""
    data = content(place, name, MANIFEST_BYTES)
    if decode(data, Manifest) is None:
        if data is not None:
            place.remove(name)
        place.put_new(name, msgspec.json.encode(manifest))
    found = load(place, name, Manifest)
    if found is None or found.files != manifest.files:
        raise StorageFailed(f"{place.path(name)} is not that of {manifest.generation} of job {manifest.job!r}")


def _point_latest(place: StorageFolder, manifest: Manifest) -> None:
    now = load(place, LATEST, Latest)
    new = Latest(job=manifest.job, generation=manifest.generation, folder=folder(manifest.generation))
    same_run = now is not None and now.job == new.job and now.generation.run == new.generation.run
    if now is None or not same_run or now.generation < new.generation:
        place.put(LATEST, encode(new))


def finish(url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
    """Record that `run` of `job` ended at `step`, so that a later start does not train again."""
    place = StorageFolder(url, options)
    mounts.demand_same(place)
    place.make()
    place.put(FINISHED, encode(Finished(job=job, run=run, step=step)))


def manifest_of(url: str, options: Mapping[str, Any] | None, generation: Generation) -> Manifest:
    """The MANIFEST of `generation`.

    Raises:
        Corrupt: there is none, it cannot be read, or it is another run's.
    """
    place = StorageFolder(url, options)
    home = folder(generation)
    manifest = load(place, f"{home}/{MANIFEST}", Manifest)
    if manifest is None or manifest.generation != generation:
        raise Corrupt(f"{place.path(home)}/{MANIFEST} of {generation}: missing, unreadable or of another run")
    return manifest
