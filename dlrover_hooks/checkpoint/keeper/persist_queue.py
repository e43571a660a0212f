"""Shard files that the keeper writes: pending, done, and those of an emergency flush. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.memory.keeper_segments import Found
from dlrover_hooks.checkpoint.memory.segment import SLOTS
from dlrover_hooks.checkpoint.storage import shard_writer
from dlrover_hooks.checkpoint.storage.filesystem import reason
from dlrover_hooks.checkpoint.storage.stall_guard import Attempt, StallGuard
from dlrover_hooks.errors import CheckpointError, HooksError, Stale
from dlrover_hooks.host.thread_pool import ThreadPool
from dlrover_hooks.protocol import Generation, Manifest, ShardFile


class _LastWill:
    """A requested emergency flush. `seats`: local ranks by rank."""

    def __init__(self, generation: Generation, seats: dict[int, int]) -> None:
        self.generation, self.seats = generation, seats
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only: the thread that starts the write, or one that cancels it. Any thread."""
        return self._claim.acquire(blocking=False)


class PersistQueue:
    """Writes on threads. All calls, and `tell(seat, notice)`, are on the loop's thread.

    A store that hangs blocks these threads for `stall_guard.STALL_S` per attempt; then the write fails.
    """

    def __init__(
        self, post: Callable[[Callable[[], None]], None], tell: Callable[[int, keeper_messages.KeeperMessage], None]
    ) -> None:
        self._threads = ThreadPool("store", 2, post)
        self._post, self._tell = post, tell
        self._patience = StallGuard()
        self._under_way: set[tuple[int, Generation]] = set()
        """Local rank and generation of each pending write."""
        self._wills: dict[_LastWill, Callable[[Manifest | Exception], None]] = {}
        """Flushes that wait or run, and the callback for each result."""
        self._files: dict[tuple[Generation, int], dict[int, ShardFile]] = {}
        """By generation and world size, then by rank; of the newest only. A single-rank image has world size 1."""

    @property
    def pending(self) -> int:
        """Number of files that are being written or wait to be written."""
        return self._threads.pending

    def under_way(self, seat: int) -> tuple[Generation, ...]:
        """The generations that are being made durable for this worker."""
        willed = {will.generation for will in self._wills if seat in will.seats.values()}
        return tuple(willed | {generation for other, generation in self._under_way if other == seat})

    def persist(self, found: Found, hello: keeper_messages.Hello, order: keeper_messages.Persist) -> None:
        """Write one rank's file and send `Persisted` or `PersistFailed` to its worker.

        Once per generation: it may have been saved again since, but the file's hashes may be in a MANIFEST already.
        """
        seat = hello.seat
        if (seat, order.generation) in self._under_way:
            return
        if (file := self._files.get((order.generation, order.world_size), {}).get(order.rank)) is not None:
            self._tell(seat, keeper_messages.Persisted(generation=order.generation, file=file))
            return
        self._under_way.add((seat, order.generation))
        began = time.monotonic()
        self._threads.submit(
            lambda: shard_writer.persist(
                found,
                order.url,
                order.options,
                job=hello.job,
                patience=self._patience,
                report=lambda attempt: self._report(found, seat, attempt),
            ),
            lambda file: self._persisted(seat, order, file, time.monotonic() - began),
        )

    def _report(self, found: Found, seat: int, attempt: Attempt) -> None:
        """Send a progress notice. Called on a worker thread."""
        slot, done, seconds = found.proof.slot, attempt.nbytes, attempt.seconds
        assert slot.generation is not None
        so_far = keeper_messages.Storing(
            generation=slot.generation, done_bytes=done, nbytes=slot.image_bytes, seconds=seconds
        )
        self._post(lambda: self._tell(seat, so_far))

    def _persisted(
        self, seat: int, order: keeper_messages.Persist, file: ShardFile | Exception, seconds: float
    ) -> None:
        generation = order.generation
        self._under_way.discard((seat, generation))
        if isinstance(file, shard_writer.NotAsHashed):
            file.found.segment.refute(file.found.proof.slot)
        if isinstance(file, Exception):
            said = (file.message, file.hint) if isinstance(file, HooksError) else (reason(file), "")
            gone = isinstance(file, Stale)
            self._tell(
                seat, keeper_messages.PersistFailed(generation=generation, reason=said[0], hint=said[1], gone=gone)
            )
            return
        self._files.setdefault((generation, order.world_size), {})[file.rank] = file
        while len(self._files) > SLOTS:
            self._files.pop(next(iter(self._files)))
        self._tell(seat, keeper_messages.Persisted(generation=generation, file=file, seconds=seconds))

    def forget(self, run: str) -> None:
        """`run` starts afresh: drop the files of other runs."""
        self._files = {key: files for key, files in self._files.items() if key[0].run == run}

    def last_will(
        self,
        ranks: list[Found],
        generation: Generation,
        saving: keeper_messages.Hello,
        then: Callable[[Manifest | Exception], None],
        *,
        wanted: Callable[[], bool],
    ) -> None:
        """Write and commit a complete generation to `saving.save_to`; `then` gets the manifest or the error.

        Its slots count as being persisted meanwhile; the workers get the outcome. See `give_way`.
        """
        url, options, keep, job = saving.save_to, saving.storage_options, saving.keep, saving.job
        assert url is not None
        known = self._files.get((generation, len(ranks)), {})
        will = _LastWill(generation, {found.proof.slot.rank: found.segment.seat for found in ranks})
        self._wills[will] = then

        def write() -> Manifest | None:
            if not will.claim():
                return None
            return shard_writer.last_will(
                ranks,
                generation,
                job=job,
                url=url,
                options=options,
                keep=keep,
                known=known,
                wanted=wanted,
                patience=self._patience,
            )

        self._threads.submit(write, lambda outcome: None if outcome is None else self._written(will, outcome))

    def give_way(self, seat: int) -> None:
        """Cancel a flush that still waits for a slow store: a trainer of `seat` is back and needs slots."""
        for will in list(self._wills):
            if seat in will.seats.values() and will.claim():
                self._written(will, CheckpointError("its trainer is back, and the store was busy until then"))

    def _written(self, will: _LastWill, outcome: Manifest | Exception) -> None:
        then = self._wills.pop(will)
        for rank, seat in will.seats.items():
            self._tell(seat, _end_of(will.generation, rank, outcome))
        then(outcome)


def _end_of(generation: Generation, rank: int, outcome: Manifest | Exception) -> keeper_messages.KeeperMessage:
    if isinstance(outcome, Exception):
        return keeper_messages.PersistFailed(generation=generation, reason=str(outcome), gone=True)
    return keeper_messages.Persisted(
        generation=generation, file=next(file for file in outcome.files if file.rank == rank)
    )
