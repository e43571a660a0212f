"""`ElasticSampler`: one line for a DataLoader that can stop anywhere and go on at any world size (ED-34, ED-25, DL-64).

It subclasses torch's `DistributedSampler` because Lightning replaces or re-shards every other sampler, and reads the
same attributes. It yields ints, so any map-style dataset and collate function works; it computes them in chunks, so
10**9 samples need no more memory than a thousand. Main process only: DataLoader workers get indices, never the sampler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from dlrover_hooks import config
from dlrover_hooks.data.batch import Plan, Slice, Tail
from dlrover_hooks.data.order import Indices, Order
from dlrover_hooks.data.progress import Progress
from dlrover_hooks.errors import DataMismatch, UsageError

CHUNK = 16384  # samples computed at a time: below 4096 numpy's call overhead dominates
VERSION = 1

log = logging.getLogger(__name__)


class ElasticSampler(DistributedSampler[int]):
    """This rank's samples, a step of `global_batch_size` at a time, in an order that no world size changes.

    dataset_or_len: anything with a length, or the length. batch_size: samples per micro-batch and rank.
    global_batch_size: samples per optimizer step over all ranks; None = what the first start had (batch_size * world
    size), or what a loaded state says. tail: the short last step, see `dlrover_hooks.data.batch`. num_replicas,
    rank: None = torch's process group, else WORLD_SIZE and RANK, else one process.

    Somebody must count: `on_batch()` for each micro-batch the loop received, `mark()` when the optimizer stepped,
    `commit()` at a quiet point. `elastic_loader` and the framework callbacks do. Iterating anew after an epoch that
    was begun starts the next epoch, after a restore or `resize` it goes on at the cursor.

    Raises UsageError for sizes that cannot work, DataMismatch for a state of other data.
    """

    def __init__(  # DistributedSampler.__init__ is not called: it needs a process group and fixes what is computed here
        self,
        dataset_or_len: Sized | int,
        *,
        batch_size: int,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "ghost",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.dataset = cast(Any, range(dataset_or_len) if isinstance(dataset_or_len, int) else dataset_or_len)
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed={seed} is not in [0, 2**64)")
        world, place = _world(num_replicas, rank)
        self._settled = self._explicit = global_batch_size is not None
        G = batch_size * world if global_batch_size is None else global_batch_size
        self._begin_at(Plan(len(self.dataset), batch_size, G, place, world, tail))
        self.shuffle, self.seed = shuffle, seed
        self.order = Order(self.plan.n, seed, shuffle)
        self._live: object | None = None
        self._warned = False

    # What others read of a DistributedSampler ---------------------------------------------------------------

    @property
    def epoch(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The epoch the cursor is in. It is not set: see `set_epoch`."""
        return self.progress.cursor // self.plan.n

    @property
    def drop_last(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Is the short last step left out of each epoch?"""
        return self.plan.tail == "drop"

    @property
    def num_samples(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of this rank in a whole epoch."""
        return self.plan.samples()

    @property
    def total_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of an epoch over all ranks (ghosts not counted)."""
        n, G = self.plan.n, self.plan.global_batch_size
        return n // G * G if self.drop_last else n

    def __len__(self) -> int:
        """Samples of this rank in a WHOLE epoch, after a resume too: loops compare their restored count with it."""
        return self.plan.samples()

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the cursor owns the epoch.

        Accelerate counts from 0 again after a resume and would rewind the data.
        """

    # Iterating ----------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Start an epoch, or continue one after a restore. Idempotent until a micro-batch is received.

        Returns the position.
        """
        self._settled = True
        return self.progress.begin()

    def __iter__(self) -> Iterator[int]:
        return self._ids(self.begin())

    def _ids(self, start: int) -> Iterator[int]:
        token = self._live = object()
        epoch, q = divmod(start, self.plan.n)
        try:
            for positions in _positions(self.plan, q):
                for index in self.order.indices(epoch, positions).tolist():
                    if self._live is not token:
                        raise UsageError("this iterator ended: the sampler was iterated, restored or closed meanwhile")
                    self.progress.issued += 1
                    yield index
        finally:
            if self._live is token:
                self._live = None

    def close(self) -> None:
        """End a live iterator: whoever still holds it gets a UsageError from it."""
        self._live = None

    # Accounting ---------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """Committed position: samples that are in the model, over all epochs."""
        return self.progress.cursor

    def on_batch(self) -> None:
        """The training loop received one micro-batch. Call it in the main process."""
        self.progress.on_batch()

    def mark(self) -> int:
        """The optimizer stepped: the whole steps received so far are marked. Returns the marked position."""
        return self.progress.mark()

    def commit(self) -> int:
        """A quiet point: the marked steps are committed. Returns the cursor."""
        return self.progress.commit()

    @property
    def step(self) -> Slice:
        """This rank's part of the step that the last received micro-batch belongs to."""
        return self.progress.current()[0]

    @property
    def weight(self) -> float:
        """Weight of this rank's gradient in that step, for a SUM over ranks (DL-88; see `dlrover_hooks.data.batch`)."""
        return self.step.weight

    @property
    def loss_scale(self) -> float:
        """Factor for the last received micro-batch's mean loss (besides 1 / m_r) that makes a short step exact.

        1.0 except where a rank's part of a short step is cut into micro-batches of unequal size.
        """
        step, number = self.progress.current()
        b, count = self.plan.batch_size, step.hi - step.lo
        return min(b, count - (max(number, 1) - 1) * b) * step.micro_batches / count

    @property
    def step_ends(self) -> bool:
        """True when the last received micro-batch was this rank's last in its step: now the optimizer may step."""
        step, number = self.progress.current()
        return number == step.micro_batches

    # State and world ----------------------------------------------------------------------------------------

    def resize(self, world_size: int, rank: int) -> None:
        """Another world, between iterators.

        The next iterator continues at the cursor; what was not committed is replayed.
        """
        self._must_be_idle("resize")
        G = self.plan.global_batch_size if self._settled else self.plan.batch_size * world_size
        plan = Plan(self.plan.n, self.plan.batch_size, G, rank, world_size, self.plan.tail)
        self._begin_at(plan, self.progress.cursor)

    def state_dict(self) -> dict[str, Any]:
        """The committed position and what it is a position in. The same on every rank; save it once.

        ~120 bytes of JSON.
        """
        if self.progress.issued and not self.progress.counted and not self._warned:
            self._warned = True
            log.warning(
                "the sampler's state does not move: nobody calls on_batch, mark and commit (use elastic_loader)"
            )
        return {
            "v": VERSION,
            "cursor": self.cursor,
            "tail": self.plan.tail,
            "G": self.plan.global_batch_size,
        } | self._data()

    def handover(self) -> dict[str, Any]:
        """The state for a sampler that takes this one's place between two steps (a reloaded loader): what is marked
        counts, an epoch that was trained on is over, and one of which nothing was trained (trial steps) begins again.
        """
        progress = self.progress
        trained = progress.marked > progress.base
        return self.state_dict() | {"cursor": progress.following() if trained else progress.marked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the state's cursor with the next iterator. G comes from the state unless it was given explicitly.

        Raises DataMismatch (nothing is changed) if the state is of other data, UsageError while an iterator is live.
        """
        self._must_be_idle("load_state_dict")
        self._refuse_other_data(state)
        G = self.plan.global_batch_size if self._explicit else state["G"]
        if state["G"] != G:
            log.warning("global_batch_size=%d was given: the state's %d is not used", G, state["G"])
        if state.get("tail") != self.plan.tail:
            log.warning("tail=%r is used: the state was made with %r", self.plan.tail, state.get("tail"))
        old = self.plan
        plan = Plan(old.n, old.batch_size, G, old.rank, old.world_size, old.tail)
        self._settled = True
        self._begin_at(plan, state["cursor"])

    def _data(self) -> dict[str, Any]:
        return {"n": self.plan.n, "seed": self.seed, "shuffle": self.shuffle, "algo": self.order.algo}

    def _refuse_other_data(self, state: Mapping[str, Any]) -> None:
        for name, here in ({"v": VERSION} | self._data()).items():
            if state.get(name) != here or isinstance(state.get(name), bool) != isinstance(here, bool):
                raise DataMismatch(
                    f"the data state has {name}={state.get(name)!r}, here it is {here!r}", hint=_HINTS[name]
                )
        for name, least in (("cursor", 0), ("G", 1)):
            value = state.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise DataMismatch(f"the data state has {name}={value!r}: not a count", hint="the state is damaged")

    def _begin_at(self, plan: Plan, cursor: int = 0) -> None:
        counted = hasattr(self, "progress") and self.progress.counted
        self.plan, self.num_replicas, self.rank = plan, plan.world_size, plan.rank
        self.progress = Progress(plan)
        self.progress.counted = counted
        self.progress.rewind(cursor)

    def _must_be_idle(self, verb: str) -> None:
        if self._live is not None:
            raise UsageError(
                f"{verb}() while an iterator of this sampler is live: it would go on with the old order",
                hint="leave the loop first (or close()), then restore, then iterate",
            )


_HINTS = {
    "v": "the state was written by another version of dlrover_hooks: use that version, or start anew",
    "n": "the dataset changed its length: give the old dataset back, or start anew (--fresh or resume='never')",
    "seed": "give the seed of the first start, or start anew",
    "shuffle": "give the shuffle of the first start, or start anew",
    "algo": "the order of this version differs: use the version that wrote the state, or start anew",
}


def _world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """(world size, rank): as given, else of the process group, else of the environment, else one process."""
    if dist.is_available() and dist.is_initialized():
        found = dist.get_world_size(), dist.get_rank()
    else:
        here = config.place()
        found = here.world_size, here.rank
    if num_replicas is None:
        return found[0], found[1] if rank is None else rank
    return num_replicas, (0 if num_replicas == 1 else found[1]) if rank is None else rank


def _positions(plan: Plan, q: int) -> Iterator[Indices]:
    """In-epoch positions of this rank's samples from q to the end of the epoch, whole steps at a time."""
    width, G = plan.micro_batches * plan.batch_size, plan.global_batch_size
    steps, first = plan.full_steps(q), q + plan.before * plan.batch_size
    chunk, place = max(1, CHUNK // width), np.arange(width)
    for done in range(0, steps, chunk):
        starts = first + G * np.arange(done, min(done + chunk, steps))
        yield (starts[:, None] + place).reshape(-1)
    if plan.has_tail(q):
        last = plan.step(q + steps * G)
        yield np.arange(last.lo, last.hi)
