"""The trainer's side of a checkpoint: copy into a slot, tell the keeper, load again (DL-90, DL-91).

First version: eager copies only. A tree has up to four parts: `state` (replicated: model, optimizer, loop), `data`
(replicated: cursors), `rank` (private to this global rank: random state) and `leases` (private, too: what this rank
has consumed of leased datasets, without tensors).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from dlrover_hooks.checkpoint import progress, snapshot, storage, wire
from dlrover_hooks.checkpoint.arena import Arena, choose_slot
from dlrover_hooks.checkpoint.copying import Copier
from dlrover_hooks.checkpoint.image import (
    PARTS,
    RESERVE,
    Inside,
    Layout,
    Outgrown,
    TensorSpec,
    header_bytes,
    metadata,
    plan,
)
from dlrover_hooks.checkpoint.line import Line, granted
from dlrover_hooks.checkpoint.link import KeeperLink
from dlrover_hooks.checkpoint.restoring import Fitting, Restored, Restorer
from dlrover_hooks.checkpoint.tree import OnUnsupported, flatten
from dlrover_hooks.errors import CheckpointError, HooksError, KeeperAway, Stale, UsageError
from dlrover_hooks.protocol import Generation, Held, Message, Restore, Retention, Source

_log = logging.getLogger(__name__)


class Saved(Message, frozen=True):
    """One save: `copy_s` is how long it held up the caller."""

    generation: Generation
    copy_s: float


class Checkpointer:
    """One rank's checkpoints. Verbs on the training thread; `notify` is called on the keeper link's thread."""

    def __init__(
        self,
        job: str,
        node: str,
        seat: int,
        *,
        master: str = "",
        save_to: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        keep: int | Retention = 2,
        linger_s: float = 600.0,
        notify: Callable[[wire.SaveNotice], None] = lambda _: None,
        start_keeper: bool = True,
        deadline_s: float = 30.0,
    ) -> None:
        self.job, self.node, self.seat = job, node, seat
        self.save_to = storage.absolute(save_to) if save_to is not None else None
        self.storage_options = dict(storage_options or {})
        self.error: HooksError | None = None
        """Why the newest save was skipped, None after a good one."""
        self.skipped = 0
        """Saves that were not made: no slot was free, or the keeper was away."""
        self.stale: Stale | None = None
        """Another process has this seat: what is saved here counts no more. Set by any thread."""
        self._master, self._keep = master, keep
        self._notify, self._start, self._linger_s = notify, start_keeper, linger_s
        self._run, self._attempt, self._rank, self._world_size = "", 0, 0, 1
        self._held: tuple[Held, ...] = ()
        self._line = Line(self._connect, self._hello, self._forget, deadline_s=deadline_s)
        self._arena: Arena | None = None
        self._layout: tuple[frozenset[TensorSpec], Layout] | None = None
        self._newest_complete: Generation | None = None
        self._persisting: set[Generation] = set()
        self._copier = Copier()
        self._opened: Restored | None = None
        """Opened and verified for the round that is forming, not copied yet."""

    # ---- before training

    def held(self) -> tuple[Held, ...]:
        """What this node's keeper holds, of all seats. Takes no seat.

        Raises:
            KeeperAway: there is no keeper.
            UsageError: a living process of another launch saves there.
        """
        return granted(self._line.ask(lambda ref: wire.Inventory(ref=ref, master=self._master))[0]).held

    def take_seat(self) -> None:
        """From here on this process saves for its seat; whoever had it is told. After `begin`; `save` does it, too.

        Raises:
            KeeperAway: there is no keeper.
            UsageError: a living process of another launch saves there, or a newer life of this run.
        """
        self._line.take()

    def drop(self) -> None:
        """Forget what this node holds of other runs: a fresh one begins. Takes the seat; living ones are spared."""
        self.take_seat()
        self._line.ask(lambda ref: wire.Drop(ref=ref, run=self._run))
        if self._newest_complete is not None and self._newest_complete.run != self._run:
            self._newest_complete = None

    def begin(self, run: str, attempt: int, rank: int, world_size: int) -> None:
        """What is saved from here on belongs to this run (uuid hex), attempt and global rank."""
        try:
            valid = uuid.UUID(hex=run).hex == run
        except ValueError:
            valid = False
        if not valid:
            raise UsageError(f"run {run!r} is not a uuid in hex", hint="use uuid.uuid4().hex")
        self._close_opened()
        self._run, self._attempt, self._rank, self._world_size = run, attempt, rank, world_size

    def load(self, restore: Restore, fitting: Fitting | None = None) -> Restored:
        """Load and verify what the round restores; nothing of it aliases shared memory or a file's buffer.

        Tensors that `fitting` gives are written by `fill` only.

        Raises:
            UsageError: from `fitting`; the saved state does not fit.
            Corrupt: it is not there whole, or does not match its hashes; says where.
            StorageFailed: `save_to` cannot be read.
            KeeperAway: the memory is gone with its keeper.
        """
        where = (self.seat, self._rank, self._world_size)
        restorer = Restorer(self._line, self._copier, *where, self.save_to, self.storage_options)
        found = self._opened = restorer.load(restore, fitting)
        if restore.source is Source.MEMORY:
            self._newest_complete = restore.generation
        return found

    def fill(self) -> None:
        """Write the adapter's tensors with what `load` opened and verified; nothing if that was done.

        Raises:
            Corrupt: memory was overwritten meanwhile; the tensors are of no use then.
        """
        if self._opened is not None:
            self._opened.fill()
            self._opened = None

    def _close_opened(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # ---- while training

    def save(self, step: int, tree: Mapping[str, Any], *, on_unsupported: OnUnsupported | None = None) -> Saved | None:
        """Copy `tree` into a free slot and publish it; None if this save had to be skipped (`skipped`, `error`).

        Training thread, at a quiet point; `tree` may change as soon as this returns. A dead keeper never raises here.

        Raises:
            UnsupportedState: something in `tree` cannot be saved.
        """
        began = time.perf_counter()
        flats = {part: self._flatten(part, tree[part], on_unsupported) for part in PARTS if part in tree}
        tensors = {name: tensor for flat in flats.values() for name, tensor in flat.tensors.items()}
        generation = Generation(self._attempt, step, self._run)
        skeletons = {part: flat.skeleton for part, flat in flats.items()}
        layout, header = self._image(
            snapshot.specs(tensors), Inside(generation, self._rank, self._world_size, skeletons)
        )
        try:
            arena = self._room(layout.total_bytes)
            slot = choose_slot(arena.slots(), self._newest_complete, tuple(self._persisting), run=self._run)
            if slot is None:
                raise CheckpointError("no slot is free: newest, newest complete and being persisted")
            arena.begin(slot)
            view = arena.view(slot, layout.total_bytes)
            view[: len(header)] = header
            snapshot.save(layout, tensors, view, self._copier)
            arena.publish(slot, generation, self._rank, self._world_size, layout.total_bytes)
            self._line.seat().send(wire.Published(slot=slot))
        except (HooksError, OSError) as error:
            return self._skip(step, error)
        self.error = None
        return Saved(generation, time.perf_counter() - began)

    def _flatten(self, part: str, tree: Any, on_unsupported: OnUnsupported | None) -> Any:
        where = f"rank.{self._rank}" if part == "rank" else part  # names must be unique over the files of all ranks
        return flatten(tree, where=where, on_unsupported=on_unsupported)

    def _image(self, specs: tuple[TensorSpec, ...], inside: Inside) -> tuple[Layout, bytes]:
        """The layout of before if it still fits, with this save's header."""
        key = frozenset(specs)
        if self._layout is None or self._layout[0] != key:
            self._layout = (key, plan(specs))
        layout = self._layout[1]
        try:
            return layout, header_bytes(layout, metadata(layout, inside))
        except Outgrown as outgrown:
            layout = plan(specs, RESERVE + layout.header_bytes + 2 * outgrown.needed)
            self._layout = (key, layout)
            return layout, header_bytes(layout, metadata(layout, inside))

    def _room(self, nbytes: int) -> Arena:
        """The arena, a new one if `nbytes` do not fit into its slots."""
        self._line.seat()
        if self._arena is None or self._arena.slot_bytes < nbytes:
            spare = max(nbytes // 64, 64 << 10)  # so that a header may grow without a new segment
            reply, fd = self._line.ask(lambda ref: wire.Allocate(ref=ref, slot_bytes=nbytes + spare), timeout_s=300.0)
            if isinstance(reply, wire.Refused):
                raise KeeperAway(reply.reason, hint=reply.hint)
            if self._arena is not None:
                self._arena.close()
            self._arena = Arena.attach(fd)
            self._persisting |= set(reply.persisting)
            if reply.complete is not None and self._newest_complete is None:
                self._newest_complete = reply.complete
        return self._arena

    def _skip(self, step: int, error: Exception) -> None:
        self.skipped += 1
        self.error = error if isinstance(error, HooksError) else KeeperAway(f"the slot cannot be written: {error}")
        if isinstance(error, UsageError):
            self.stale = Stale(error.message, hint=error.hint)
        _log.debug("job %s, rank %d: step %d was not saved: %s", self.job, self._rank, step, self.error)

    def complete(self, generation: Generation) -> None:
        """`generation` is memory-complete over all ranks. Any thread."""
        self._newest_complete = generation
        self._line.tell(wire.Complete(generation=generation))

    def hold(self, generation: Generation) -> None:
        """`generation` is about to be persisted: its slot is not used again. Any thread; ends with its notice."""
        self._persisting.add(generation)
        if self._line.broken:
            self._keeper_gone()

    def release(self, generation: Generation) -> None:
        """It is not going to be persisted after all. Any thread."""
        self._persisting.discard(generation)

    def persist(self, generation: Generation) -> None:
        """Have the keeper write this rank's file of `generation`; a notice tells how it went. Any thread."""
        if self.save_to is None:
            raise UsageError("nothing can be made durable without `save_to`")
        self._persisting.add(generation)
        message = wire.Persist(generation=generation, rank=self._rank, url=self.save_to, options=self.storage_options)
        if not self._line.tell(message):
            self._noticed(wire.PersistFailed(generation=generation, reason="the keeper is gone", gone=True))

    def close(self, finished: bool = False) -> None:
        """Leave; `finished`: nobody will need what this node holds in memory. Idempotent."""
        self._close_opened()
        self._line.close(finished=finished)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    # ---- the line

    def _connect(self, deadline_s: float) -> KeeperLink:
        return KeeperLink.connect(
            self.job,
            self.node,
            notify=self._noticed,
            ended=self._keeper_gone,
            start=self._start,
            linger_s=self._linger_s,
            deadline_s=deadline_s,
        )

    def _forget(self) -> None:
        """The keeper died, and with it what it held."""
        self._newest_complete = None
        self._keeper_gone()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _hello(self, ref: int) -> wire.Hello:
        return wire.Hello(
            ref=ref,
            seat=self.seat,
            job=self.job,
            master=self._master,
            run=self._run,
            attempt=self._attempt,
            save_to=self.save_to,
            storage_options=self.storage_options,
            keep=self._keep,
        )

    def _noticed(self, notice: wire.Notice) -> None:
        """Hand on what is about this life's saves; the keeper also tells how those of the life before went."""
        if isinstance(notice, wire.Replaced):
            self.stale = Stale(
                f"job {self.job}: process {notice.pid} has taken over seat {self.seat} of node {self.node}",
                hint="this process is an old life of that worker: end it",
            )
            return
        if isinstance(notice, (wire.Storing, wire.Persisted)) and self._rank == 0 and self.save_to is not None:
            progress.say(self.job, self.save_to, notice)
        if isinstance(notice, wire.Storing):
            return
        if isinstance(notice, (wire.Persisted, wire.PersistFailed)):
            self._persisting.discard(notice.generation)
        if (notice.generation.run, notice.generation.attempt) == (self._run, self._attempt):
            self._notify(notice)

    def _keeper_gone(self) -> None:
        """What was to be persisted will never be answered for: report it. Any thread."""
        for generation in tuple(self._persisting):
            self._noticed(wire.PersistFailed(generation=generation, reason="the keeper is gone", gone=True))
