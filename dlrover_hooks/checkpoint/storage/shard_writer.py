"""How a keeper persists slots: one rank's shard file, or an entire generation in an emergency flush. Worker threads.

Global rank 0 writes its entire image. The others write their private tensors (names that begin with `rank.`) and their
shards of sharded tensors, because replicated state needs to be stored only once. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dlrover_hooks.checkpoint.memory.checksums import damaged
from dlrover_hooks.checkpoint.memory.keeper_segments import Found
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot
from dlrover_hooks.checkpoint.state.safetensors_header import Header, parse
from dlrover_hooks.checkpoint.state.safetensors_layout import subset
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.stall_guard import Attempt, StallGuard
from dlrover_hooks.checkpoint.storage.url_claim import KEEPER, UrlClaim
from dlrover_hooks.errors import Corrupt, SaveToBusy, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Retention, ShardFile

PRIVATE = "rank."
BACKOFF_S = (0.5, 1.0, 2.0)
_log = logging.getLogger(__name__)


class NotAsHashed(Corrupt):
    """The slot `found` no longer holds what was hashed."""

    def __init__(self, found: Found, message: str) -> None:
        super().__init__(message)
        self.found = found


def persist(
    found: Found,
    url: str,
    options: Mapping[str, Any],
    *,
    job: str,
    patience: StallGuard,
    wait: Callable[[float], None] = time.sleep,
    report: Callable[[Attempt], None] = lambda _: None,
) -> ShardFile:
    """Write the shard file of a slot of `job`. Storage failures are retried three times.

    Each retry opens the file system again (`StorageFolder`). `report` is called regularly during a long write.

    Raises:
        SaveToBusy: another job's generation is there.
        StorageFailed: the last failure.
        NotAsHashed: the slot no longer holds what was hashed.
    """
    what = f"write the file of {found.proof.slot.generation}, rank {found.proof.slot.rank}, to {url}"
    for pause in (*BACKOFF_S, None):
        try:
            return patience.run(lambda attempt: _persist(found, url, options, job, attempt), what, report)
        except StorageFailed as error:
            if pause is None:
                raise
            _log.warning("%s, trying again in %s s", error.message, pause)
            wait(pause)
    raise AssertionError


def _persist(found: Found, url: str, options: Mapping[str, Any], job: str, attempt: Attempt) -> ShardFile:
    slot, chunks = found.proof
    shared, generation = found.segment.shared, slot.generation
    assert generation is not None
    view = shared.view(slot.index, slot.image_bytes)
    if slot.rank == 0:
        pieces, nbytes = [view], slot.image_bytes
    else:
        verify(found)
        part = subset(header := parse(view), _own(header))
        pieces, nbytes = [memoryview(part.header), *(view[a:b] for a, b in part.pieces)], part.nbytes
    file = generations.write_shard(
        url, options, generation, slot.rank, slot.world_size, pieces, nbytes, job=job, attempt=attempt
    )
    if shared.seq(slot.index) != slot.seq:
        text = f"slot {slot.index} of seat {found.segment.seat} was overwritten while {generation} was written"
        raise NotAsHashed(found, text)
    if slot.rank == 0 and file.chunks != chunks:
        raise NotAsHashed(found, _damage(found, view))
    return file


def _own(header: Header) -> Callable[[str], bool]:
    """A predicate: whether a tensor of an image belongs into the file of a rank above 0."""
    shards = {name for name, whole in header.wholes().items() if whole.sharded and not whole.copy}
    return lambda name: name.startswith(PRIVATE) or name in shards


def verify(found: Found) -> HashedSlot:
    """Hash the slot again and return its proof if it still matches.

    Raises:
        NotAsHashed: it does not match; the message contains segment, slot and chunk.
    """
    slot, chunks = found.proof
    shared = found.segment.shared
    view = shared.view(slot.index, slot.image_bytes)
    threads = min(4, len(os.sched_getaffinity(0)))  # training waits for this
    if damaged(view, chunks, threads) is not None or shared.seq(slot.index) != slot.seq:
        raise NotAsHashed(found, _damage(found, view))
    return found.proof


def _damage(found: Found, view: memoryview) -> str:
    slot, chunks = found.proof
    seat = f"seat {found.segment.seat}" + (f" of node {found.segment.home}" if found.segment.home else "")
    where = f"slot {slot.index} of {seat}, {slot.generation}, rank {slot.rank}"
    if found.segment.shared.seq(slot.index) != slot.seq:
        return f"{where}: it was overwritten"
    chunk = damaged(view, chunks)
    return f"{where}: chunk {chunk} did not match its hash" if chunk is not None else f"{where}: damaged for a while"


def last_will(
    ranks: list[Found],
    generation: Generation,
    *,
    job: str,
    url: str,
    options: Mapping[str, Any],
    keep: int | Retention,
    known: Mapping[int, ShardFile],
    patience: StallGuard,
    wanted: Callable[[], bool] = lambda: True,
) -> Manifest:
    """Write and commit an entire generation held by this keeper alone. `known`: files that are written already.

    `wanted()` is checked before the commit. The URL is claimed only briefly, so that a successor of the job can claim
    it.

    Raises:
        SaveToBusy: another job has claimed the URL meanwhile, or its generations are there.
        Stale: the job was restarted fresh there, with another run.
        NotAsHashed: a slot is damaged. Nothing is committed.
        StorageFailed, Corrupt: it could not be persisted; nothing is committed.
    """
    patience.run(lambda _: _refuse(url, options, job, generation), f"claim {url} for job {job!r}")
    files = tuple(
        known.get(found.proof.slot.rank)
        or persist(found, url, options, job=job, patience=patience, wait=lambda _: None)
        for found in ranks
    )
    manifest = Manifest(job, generation, len(ranks), files, time.time())

    def commit() -> None:
        with _claimed(url, options, job):
            if not wanted():
                raise Corrupt(f"{generation} was given up meanwhile: job {job!r} starts over")
            generations.commit(url, options, manifest, keep)

    patience.run(lambda _: commit(), f"commit {generation} to {url}")
    return manifest


def _refuse(url: str, options: Mapping[str, Any], job: str, generation: Generation) -> None:
    with _claimed(url, options, job):
        generations.refuse_others(url, options, job)
        generations.refuse_given_up(url, options, generation)


@contextlib.contextmanager
def _claimed(url: str, options: Mapping[str, Any], job: str) -> Iterator[None]:
    """Claim the URL, unless a process of the same job (its master) holds the claim: commits are idempotent."""
    claim = None
    try:
        claim = UrlClaim.take(url, options, job, f"{KEEPER}, pid {os.getpid()} on {socket.gethostname()}")
    except SaveToBusy:
        holder = generations.holder(url, options)
        if holder is None or holder.job != job:
            raise
    try:
        yield
    finally:
        if claim is not None:
            claim.release()
