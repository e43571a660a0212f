"""The trainer's side of a checkpoint: copy into a slot, notify the keeper, load again.

A tree has up to four parts: `state` (replicated: model, optimizer, loop), `data` (replicated: cursors), `rank` (private
to this global rank: random state) and `leases` (also private: the consumed ranges of leased datasets, no tensors).
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.ipc.replica_client import Locate, Neighbours
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.checkpoint.memory.slot_policy import NO_SLOT, NoSlot
from dlrover_hooks.checkpoint.restore.generation_loader import Fitting, LoadedTree, Restorer
from dlrover_hooks.checkpoint.save import progress_log
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.checkpoint.save.overlap_policy import EAGER, Mode
from dlrover_hooks.checkpoint.save.segment_client import MemoryNotReady, SegmentClient
from dlrover_hooks.checkpoint.save.slot_writer import Changed, SlotSave, SlotTarget, Writer
from dlrover_hooks.checkpoint.save.successor_notes import SuccessorNotes
from dlrover_hooks.checkpoint.save.survivor_image import WHOSE, Lone
from dlrover_hooks.checkpoint.state.pytree import Memo, OnUnsupported, flatten
from dlrover_hooks.checkpoint.state.safetensors_layout import PARTS, Inside
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout
from dlrover_hooks.errors import HooksError, KeeperAway, Stale, UsageError
from dlrover_hooks.protocol import Generation, Held, Located, Message, Restore, Retention, Source

_log = logging.getLogger(__name__)


class Saved(Message, frozen=True):
    """One save. `copy_s`: seconds for which it blocked the caller."""

    generation: Generation
    copy_s: float


class Checkpointer:
    """One rank's checkpoints. Methods run on the training thread; `notify` on the keeper connection's thread."""

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
        locate: Locate = lambda *_: Located(),
        notify: Callable[[keeper_messages.SaveNotice], None] = lambda _: None,
        start_keeper: bool = True,
        deadline_s: float = 30.0,
        mode: str = EAGER,
    ) -> None:
        self.job, self.node, self.seat = job, node, seat
        self.save_to = generations.absolute(save_to) if save_to is not None else None
        self.storage_options = dict(storage_options or {})
        self.error: HooksError | None = None
        """Why the newest save was skipped, None after a good one."""
        self.skipped = 0
        """Saves that were not made because no slot was free or no keeper could be reached."""
        self._skipping_since: float | None = None
        self.stale: Stale | None = None
        """Another process has taken over this worker: what this process saves no longer counts. Set by any thread."""
        self.damaged: keeper_messages.Damaged | None = None
        """The newest notice that a slot no longer holds what was copied into it. The next save copies all again."""
        self._master, self._keep = master, keep
        self._notify, self._start, self._linger_s = notify, start_keeper, linger_s
        self._rank, self._world_size = 0, 1
        self.generations = GenerationTracker()
        self._whose, self._lone = WHOSE, Lone()
        self._line = KeeperClient(self._connect, self._hello, self._forget, deadline_s=deadline_s)
        self.neighbours = Neighbours(self._line, node, locate)
        self._segments = SegmentClient(self._line, self._allocated, lambda: self._writer.unmapped())
        self.notes = SuccessorNotes(self._line, self._segments)
        self._recipe: CachedLayout | None = None
        self._memo: Memo = {}
        self.parameters: Callable[[], Iterable[Any]] = tuple
        """The models' parameters (torch). The frozen ones are not copied at every save."""
        self._writer = self._make_writer(mode)
        self._opened: LoadedTree | None = None
        """Opened and verified for the round that is forming; not copied yet."""

    def _make_writer(self, mode: str) -> Writer:
        if "torch" not in sys.modules:
            return Writer()
        from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter

        return LazyWriter(Mode(mode), self._skip, lambda: self.parameters())

    # ---- before training

    def held(self) -> tuple[Held, ...]:
        """What this node's keeper holds of all workers. Does not register this worker.

        A worker that starts its keeper itself does not wait for it here: a new keeper holds nothing.

        Raises:
            KeeperAway: there is no keeper.
            UsageError: a living process of another launch saves there.
        """
        if self._start and not self._line.opened and KeeperLink.begin(self.job, self.node, self._linger_s):
            return ()
        welcome = self._line.inventory(self._master)
        for line in welcome.damage:
            _log.warning("job %s, node %s: a generation in memory is lost: %s", self.job, self.node, line)
        return welcome.held

    def take_seat(self) -> None:
        """Register this worker at the keeper; a process that was registered before is notified.

        Call it after `begin`; `save` does it as well.

        Raises:
            KeeperAway: there is no keeper.
            UsageError: a living process of another launch saves there, or a newer incarnation of this run.
        """
        self._line.take()

    def drop(self) -> None:
        """Discard what this node holds of other runs, except living processes' images. Calls `take_seat` first."""
        self.take_seat()
        run = self.generations.run
        self._line.ask(lambda ref: keeper_messages.Drop(ref=ref, run=run))
        if self.generations.complete_here is not None and self.generations.complete_here.run != run:
            self.generations.complete_here = None

    def begin_session(self) -> GenerationTracker:
        """A new session saves and votes from here on. Returns the tracker of its generations."""
        self.generations = self.generations.next_session()
        return self.generations

    def begin(self, run: str, attempt: int, rank: int, world_size: int) -> None:
        """Assign all following saves to this run (uuid hex), attempt and global rank."""
        try:
            valid = uuid.UUID(hex=run).hex == run
        except ValueError:
            valid = False
        if not valid:
            raise UsageError(f"run {run!r} is not a uuid in hex", hint="use uuid.uuid4().hex")
        self._close_opened()
        self.generations.begin(run, attempt)
        self._rank, self._world_size = rank, world_size
        self._whose = rank, world_size

    def load(self, restore: Restore, fitting: Fitting | None = None) -> LoadedTree:
        """Load and verify what the round restores. The result shares no memory with the segment or a file's buffer.

        Tensors that `fitting` provides are written by `fill` only.

        Raises:
            UsageError: from `fitting`; the saved state does not fit.
            Corrupt: the generation is incomplete or does not match its hashes; names the place.
            StorageFailed: `save_to` cannot be read.
            KeeperAway: the keeper is gone, and the memory with it.
        """
        where = (self.seat, self._rank, self._world_size)
        means = (self._line, self._writer.copier, *where, self.save_to, self.storage_options, self.neighbours.fetch)
        found = self._opened = Restorer(*means).load(restore, fitting)
        if restore.source is not Source.STORAGE:
            self.generations.complete_here = restore.generation
        return found

    def fill(self) -> None:
        """Copy what `load` opened and verified into the adapter's tensors. Does nothing if that was done.

        Raises:
            Corrupt: memory was overwritten during the copy; the tensors are unusable then.
        """
        if self._opened is not None:
            self._opened.fill()
            self._opened = None

    def _close_opened(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # ---- while training

    def image_bytes(self, tree: Mapping[str, Any]) -> int:
        """Bytes of an image of `tree`. Raises UnsupportedState if something in it cannot be saved."""
        return self._shot(0, tree).recipe.layout.total_bytes

    def prepare(self, nbytes: int) -> None:
        """Prepare memory for images of `nbytes` in the background. Never blocks; the save reports errors (`error`)."""
        self._segments.prepare(nbytes)

    @property
    def ready(self) -> bool:
        """The memory of the newest `prepare` or `save` is ready."""
        return self._segments.ready

    def save(
        self,
        step: int,
        tree: Mapping[str, Any],
        *,
        behind: bool = False,
        last: bool = False,
        on_unsupported: OnUnsupported | None = None,
    ) -> Saved | None:
        """Copy `tree` into a free slot and publish it; None if this save had to be skipped (`skipped`, `error`).

        Training thread, at a step boundary; `tree` may change as soon as this returns. `behind`: an optimizer step
        follows, so parameters and optimizer state may be copied until then (see `Mode`). `last`: no other save follows,
        and the caller retries until this one is made. A dead keeper never raises here.

        Raises:
            UnsupportedState: something in `tree` cannot be saved.
        """
        self._writer.wait()
        began = time.perf_counter()
        lazy = behind and self._writer.chooses_lazy()
        shot = self._shot(step, tree, on_unsupported)
        self.error = None
        if self.damaged is not None:
            self.damaged = None
            self._writer.damaged()
        while True:
            try:
                self._write(shot, lazy=lazy, last=last)
                self._skipping_since = None
                return Saved(shot.generation, time.perf_counter() - began)
            except Changed:
                shot = self._shot(step, tree, on_unsupported)  # inspects all tensors: something has changed
            except (HooksError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                return self._skip(error)

    def save_lone(self, step: int, tree: Mapping[str, Any], within_s: float) -> bool:
        """Copy `tree`, the same on all ranks, as a single-rank image, from which every rank can continue.

        For the last step boundary of a round that broke. It needs no votes. Of the other generations here, only the
        newest complete one and those being persisted are kept. Memory that is being prepared is waited for: a round may
        break before the first save. False: it was not made (`error`), or not hashed `within_s`.
        """
        until = time.monotonic() + within_s
        self._lone.want(self.generations.at(step))
        before, self._whose = self._whose, WHOSE
        try:
            while self.save(step, tree, last=True) is None:
                if not isinstance(self.error, MemoryNotReady) or time.monotonic() > until:
                    return False
        finally:
            self._whose = before
        return self._lone.wait(max(0.0, until - time.monotonic()))

    def _write(self, shot: SlotSave, *, lazy: bool, last: bool) -> None:
        self._writer.check()
        shared = self._segments.take(shot.recipe.layout.total_bytes)
        slots, heard = shared.slots(), self.generations.heard(alone=self._world_size == 1)
        if self._whose != (self._rank, self._world_size):  # single-rank image: the other generations may be overwritten
            heard = heard._replace(hopeless=frozenset(one.generation for one in slots if one.generation is not None))
        slot = self.generations.choose_slot(slots, heard, shot.generation, last=last)
        if slot is None:
            raise NoSlot("no slot is free for this save: it is left out", hint=NO_SLOT)
        shared.begin(slot)
        self._writer.write(shot, self._target(shared, slot, shot), lazy=lazy)

    def _shot(self, step: int, tree: Mapping[str, Any], on_unsupported: OnUnsupported | None = None) -> SlotSave:
        flats = {part: self._flatten(part, tree[part], on_unsupported) for part in PARTS if part in tree}
        tensors: dict[str, Any] = functools.reduce(operator.or_, (flat.tensors for flat in flats.values()), {})
        generation = self.generations.at(step)
        skeletons = {part: msgspec.Raw(flat.skeleton) for part, flat in flats.items()}
        recipe = self._recipe
        found = recipe.settled(tensors) if recipe is not None else None
        if found is None and (recipe is None or not recipe.fits(tensors)):
            recipe = CachedLayout(tensors, self._writer.seldom(tensors))
        assert recipe is not None
        self._recipe = recipe
        header = recipe.header(Inside(generation, *self._whose, skeletons))
        holds = (lambda: recipe.holds(tensors)) if found is not None else None
        return SlotSave(generation, recipe, header, found or recipe.sources(tensors), holds)

    def _target(self, shared: SharedSegment, slot: int, shot: SlotSave) -> SlotTarget:
        size, (rank, world_size) = shot.recipe.layout.total_bytes, self._whose

        def publish(unchanged: tuple[tuple[int, int], ...]) -> None:
            shared.publish(slot, shot.generation, rank, world_size, size)
            message = keeper_messages.Published(
                slot=slot, segment=shared.number, seq=shared.seq(slot), unchanged=unchanged
            )
            if not self._line.tell(message):
                raise KeeperAway("the keeper is gone", hint="the next save starts a new one")

        return SlotTarget(shared.number, slot, shared.view(slot, size), shared.view(slot), publish)

    @property
    def skipping_s(self) -> float:
        """Seconds since the first of the due saves that were not made; 0 after a good one."""
        return time.monotonic() - self._skipping_since if self._skipping_since is not None else 0.0

    def wait_copied(self) -> None:
        """Return when the last save is copied. Weights may then be changed by other means than an optimizer step."""
        self._writer.wait()

    def took(self, seconds: float) -> None:
        """The step that began with the last save took `seconds`: the measurement that `Mode` uses."""
        self._writer.took(seconds)

    def _flatten(self, part: str, tree: Any, on_unsupported: OnUnsupported | None) -> Any:
        where = f"rank.{self._rank}" if part == "rank" else part  # names must be unique across the files of all ranks
        return flatten(tree, where=where, on_unsupported=on_unsupported, memo=self._memo)

    def _allocated(self, reply: keeper_messages.Allocated) -> None:
        """Take over what the keeper reports together with new memory. Any thread."""
        self.generations.allocated(reply.complete, reply.persisting)

    def _skip(self, error: Exception) -> None:
        """Count a save that was not made. Any thread."""
        self.skipped += 1
        if self._skipping_since is None:
            self._skipping_since = time.monotonic()
        self.error = error if isinstance(error, HooksError) else KeeperAway(f"the slot cannot be written: {error}")
        if isinstance(error, UsageError):
            self.stale = Stale(error.message, hint=error.hint)
        _log.debug("job %s, rank %d: not saved: %s", self.job, self._rank, self.error)

    def complete(self, generation: Generation) -> None:
        """`generation` is complete in memory on all ranks. Any thread."""
        self.generations.complete_here = generation
        self._line.tell(keeper_messages.Complete(generation=generation))

    def persist(self, generation: Generation) -> None:
        """Have the keeper write this rank's file of `generation`; a notice reports the result. Any thread."""
        if self.save_to is None:
            raise UsageError("nothing can be made durable without `save_to`")
        self.generations.ordered(generation)
        which = {"generation": generation, "rank": self._rank, "world_size": self._world_size}
        if not self._line.tell(keeper_messages.Persist(**which, url=self.save_to, options=self.storage_options)):
            self._noticed(keeper_messages.PersistFailed(generation=generation, reason="the keeper is gone", gone=True))

    def fail_if_keeper_gone(self) -> None:
        """Report what is to be persisted as failed if the keeper is gone and none has taken its place. Any thread."""
        if self._line.broken:
            self._keeper_gone()

    def close(self, finished: bool = False) -> None:
        """Disconnect. `finished`: this node's images are not needed any more. Idempotent; does nothing in a fork."""
        if not self._line.here:
            return
        self._writer.close()
        self._close_opened()
        self._line.close(finished=finished)
        self._segments.close()

    # ---- the connection

    def _connect(self, deadline_s: float) -> KeeperLink:
        return KeeperLink.connect(
            self.job, self.node, notify=self._noticed, ended=self._keeper_gone, start=self._start,
            linger_s=self._linger_s, deadline_s=deadline_s,
        )  # fmt: skip

    def _forget(self) -> None:
        """The keeper died, and everything it held is lost. Any thread."""
        self.generations.complete_here = None
        self._keeper_gone()
        self._segments.lose()

    def _hello(self, ref: int) -> keeper_messages.Hello:
        return keeper_messages.Hello(
            ref=ref, seat=self.seat, job=self.job, master=self._master, run=self.generations.run,
            attempt=self.generations.attempt, save_to=self.save_to, storage_options=self.storage_options,
            keep=self._keep, replicate=self.neighbours.order,
        )  # fmt: skip

    def _noticed(self, notice: keeper_messages.Notice) -> None:
        """Pass on notices about this incarnation's saves; the keeper also reports those of the previous one."""
        if isinstance(notice, keeper_messages.Replaced):
            self.stale = Stale(
                f"job {self.job}: process {notice.pid} has replaced this one as local rank {self.seat} of "
                f"node {self.node}",
                hint="this process is an older incarnation of that worker: end it",
            )
            return
        if isinstance(notice, (keeper_messages.Unreplicated, keeper_messages.Space, keeper_messages.Damaged)):
            progress_log.warn(self.job, self._rank, notice)
            self.damaged = notice if isinstance(notice, keeper_messages.Damaged) else self.damaged
            return
        if (
            isinstance(notice, (keeper_messages.Storing, keeper_messages.Persisted))
            and self._rank == 0
            and self.save_to is not None
        ):
            progress_log.say(self.job, self.save_to, notice)
        if isinstance(notice, keeper_messages.Storing) or self._lone.takes(notice):
            return
        if isinstance(notice, (keeper_messages.Persisted, keeper_messages.PersistFailed)):
            refused = isinstance(notice, keeper_messages.PersistFailed) and not notice.gone
            self.generations.ended(
                notice.generation, stored=not isinstance(notice, keeper_messages.PersistFailed), refused=refused
            )
        if self.generations.current(notice.generation):
            self._notify(notice)

    def _keeper_gone(self) -> None:
        """Report everything that was to be persisted as failed. Any thread."""
        for generation in self.generations.pending:
            self._noticed(keeper_messages.PersistFailed(generation=generation, reason="the keeper is gone", gone=True))
