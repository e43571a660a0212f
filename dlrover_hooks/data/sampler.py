"""`ElasticSampler`: lets a DataLoader stop anywhere and continue at any world size.

It subclasses torch's `DistributedSampler` because Lightning replaces or re-shards every other sampler, and reads the
same attributes. It yields ints, so any map-style dataset and collate function works, or entire micro-batches as arrays.
It computes them in chunks, so 10**9 samples need no more memory than a thousand. Main process only: DataLoader workers
get indices, never the sampler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import msgspec
import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from dlrover_hooks import config
from dlrover_hooks.data.batch_plan import BatchPlan, Slice, Tail, fitting, uneven_shares
from dlrover_hooks.data.cursor import Progress
from dlrover_hooks.data.feistel import Indices
from dlrover_hooks.data.order import Kind, Order
from dlrover_hooks.data.saved_position import refuse_other, saved_position
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Shares

CHUNK = 16384  # samples computed at a time: below 4096 numpy's call overhead dominates
_ENDED = "this iterator ended: the sampler was iterated, restored or closed meanwhile"

log = logging.getLogger(__name__)


class ElasticSampler(DistributedSampler[Any]):
    """This rank's samples, a step of `global_batch_size` at a time, in an order that does not depend on the world size.

    Args:
        dataset_or_len: anything with a length, or the length.
        batch_size: samples per micro-batch and rank; smaller if more ranks must share the global batch, or if it was
            another at the first start.
        global_batch_size: samples per optimizer step over all ranks; None = as at the first start (batch_size * world
            size), or from a loaded state.
        shuffle: another order in every epoch.
        order, block, window: see `dlrover_hooks.data.order`; None = according to `shuffle`.
        seed: of the order.
        tail: the last step of an epoch, see `dlrover_hooks.data.batch_plan`.
        yield_batches: yield micro-batches, each an int64 array of at most batch_size ids, for
            `DataLoader(dataset, batch_size=None, sampler=sampler)` and a dataset that takes arrays.
        num_replicas, rank: None = torch's process group, else WORLD_SIZE and RANK, else one process.

    The caller must call `on_batch()` for each micro-batch the loop received, `mark()` after each optimizer step and
    `commit()` at each step boundary. `elastic_loader` and the framework callbacks do that. After an epoch with at least
    one step, a new iterator starts the next epoch. After a restore it continues at the cursor, after `resize` after the
    steps received.

    Raises UsageError for invalid sizes, DataMismatch for a state of other data.
    """

    def __init__(  # DistributedSampler.__init__ is not called: it needs a process group and fixes what is computed here
        self,
        dataset_or_len: Sized | int,
        *,
        batch_size: int,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        order: Kind | None = None,
        block: int | None = None,
        window: int | None = None,
        seed: int = 0,
        tail: Tail = "ghost",
        yield_batches: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.dataset = cast(Any, range(dataset_or_len) if isinstance(dataset_or_len, int) else dataset_or_len)
        world, place = _world(num_replicas, rank)
        self._settled = self._explicit = global_batch_size is not None
        G = batch_size * world if global_batch_size is None else global_batch_size
        self._batch_size = batch_size
        crowded = min(batch_size, world) > 0 and G % batch_size == 0 and G // batch_size < world
        size = self._fitting(G, world) if crowded else batch_size
        self._told = _told_shares(world)
        self.progress = Progress(self._planned(_length(self.dataset), size, G, place, world, tail))
        self.seed, self.yield_batches = seed, yield_batches
        self.order = Order(self.plan.n, seed, shuffle if order is None else order, block=block, window=window)
        self.restored = False
        """A state was loaded whose cursor is not 0."""
        self._live: object | None = None
        self._warned = False

    @property
    def plan(self) -> BatchPlan:
        """How many micro-batches of a step each rank runs: `shares`, `efficiency`, `suggestion`, `summary`."""
        return self.progress.plan

    @property
    def fixed_length(self) -> bool:
        """Whether all epochs are equally long. If False (tail "carry"), loops that rely on a length must refuse."""
        return self.plan.fixed_length

    # The attributes of a DistributedSampler -----------------------------------------------------------------

    @property
    def num_replicas(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The world size."""
        return self.plan.world_size

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The global rank."""
        return self.plan.rank

    @property
    def shuffle(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether each epoch has its own order."""
        return self.order.shuffle

    @property
    def epoch(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The epoch of the cursor. It is not set: see `set_epoch`."""
        return self.progress.cursor // self.plan.n

    @property
    def drop_last(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the short last step is left out of each epoch."""
        return self.plan.tail == "drop"

    @property
    def num_samples(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of this rank in a complete epoch."""
        return self.plan.samples()

    @property
    def total_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of an epoch over all ranks, without ghosts."""
        n, G = self.plan.n, self.plan.global_batch_size
        return n // G * G if self.drop_last else n

    def __len__(self) -> int:
        """Length of a COMPLETE epoch on this rank, also after a resume: loops compare their restored count with it.

        Samples, or micro-batches with `yield_batches`. With tail "carry" it is the length of the current epoch.
        """
        if self.yield_batches:
            return self.micro_batches()
        return self.plan.samples(self.progress.first())

    def micro_batches(self) -> int:
        """Micro-batches of this rank in a complete epoch; with tail "carry" in the current one."""
        return self.plan.length(self.progress.first())

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the cursor determines the epoch.

        Accelerate counts from 0 again after a resume and would rewind the data.
        """

    # Iterating ----------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Start an epoch, or continue one after a restore. Idempotent until a micro-batch is received.

        Returns the position.
        """
        self._settled = True
        return self.progress.begin()

    def __iter__(self) -> Iterator[Any]:
        return (ids for _, ids in self.batches()) if self.yield_batches else self._ids(self._chunks(self.begin()))

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Begin, and yield each micro-batch: (endless position of its first sample, ids [at most batch_size]).

        The ids are a list, or an int64 array with `yield_batches`.
        """
        start = self.begin()
        return self._batches(self._chunks(start), start - start % self.plan.n)

    def _batches(self, chunks: Iterator[tuple[Indices, Indices]], epoch: int) -> Iterator[tuple[int, Any]]:
        token, b = self._take_over(), self.plan.batch_size
        try:
            for positions, ids in chunks:
                row, lo = ids if self.yield_batches else ids.tolist(), 0  # one Python step per micro-batch, none per id
                for first in positions[::b].tolist():
                    if self._live is not token:
                        raise UsageError(_ENDED)
                    part = row[lo : lo + b]
                    lo += b
                    self.progress.issued += len(part)
                    yield epoch + first, part
        finally:
            self._give_back(token)

    def _ids(self, chunks: Iterator[tuple[Indices, Indices]]) -> Iterator[int]:
        token = self._take_over()
        try:
            for _, ids in chunks:
                for index in ids.tolist():
                    if self._live is not token:
                        raise UsageError(_ENDED)
                    self.progress.issued += 1
                    yield index
        finally:
            self._give_back(token)

    def _chunks(self, start: int) -> Iterator[tuple[Indices, Indices]]:
        """(in-epoch positions, ids), complete micro-batches, from `start` to the end of its epoch."""
        epoch, q = divmod(start, self.plan.n)
        for positions in _positions(self.plan, q):
            yield positions, self.order.onward(epoch, positions)

    def _take_over(self) -> object:
        self._live = token = object()
        return token

    def _give_back(self, token: object) -> None:
        if self._live is token:
            self._live = None

    def close(self) -> None:
        """End a live iterator: its next call raises UsageError."""
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
        """The optimizer stepped: the complete steps received so far are marked. Returns the marked position."""
        return self.progress.mark()

    def commit(self) -> int:
        """A step boundary: the marked steps are committed. Returns the cursor."""
        return self.progress.commit()

    @property
    def step(self) -> Slice:
        """This rank's part of the step that the last received micro-batch belongs to."""
        return self.progress.current()[0]

    @property
    def weight(self) -> float:
        """Weight of this rank's gradient in that step, for a SUM over ranks, see `dlrover_hooks.data.batch_plan`."""
        return self.progress.weight

    @property
    def loss_scale(self) -> float:
        """Factor for the last received micro-batch's mean loss (besides 1 / m_r) that makes a short step exact.

        1.0 unless a rank's part of a short step is cut into micro-batches of unequal size.
        """
        step, number = self.progress.current()
        b, count = self.plan.batch_size, step.hi - step.lo
        return min(b, count - (max(number, 1) - 1) * b) * step.micro_batches / count

    def sample_weights(self) -> NDArray[np.float64]:
        """Weight of each sample of the last received micro-batch in its step's mean over all ranks; a ghost has 0.0.

        They add up to 1 over the micro-batches and ranks of a step. For a loop with a loss per sample:
        `(losses * weights).sum().backward()` and gradients SUMmed over ranks (times world size if they are averaged)
        is exact in every step, and needs neither `weight` nor `loss_scale`.
        """
        step, number = self.progress.current()
        b = self.plan.batch_size
        count = min(b, step.hi - step.lo - (max(number, 1) - 1) * b)
        return np.full(count, 0.0 if step.ghost else 1 / step.samples)

    @property
    def step_ends(self) -> bool:
        """True if the last received micro-batch was this rank's last in its step: the optimizer may step now."""
        return self.progress.step_ends

    # State and world ----------------------------------------------------------------------------------------

    def resize(self, world_size: int, rank: int) -> None:
        """Change the world in a live run: the next iterator continues after the steps received, committed or not.

        Every rank calls it at the same step. Raises UsageError in the middle of a step, whose micro-batches are
        distributed for the old world. If the model is rolled back to the last commit, call `rollback` first.
        `ElasticLoader.resize` also works during an iteration, and the loop continues.
        """
        self._must_be_idle("resize")
        if not self.progress.whole:
            raise UsageError(
                f"rank {self.rank}: resize() in the middle of a step, {self.progress.current()[1]} of its "
                f"{self.progress.current()[0].micro_batches} micro-batches received",
                hint="call it when step_ends is true on every rank, or rollback() to the last commit first",
            )
        old = self.plan
        G = old.global_batch_size if self._settled else self._batch_size * world_size
        self._told = None  # it was for the world before
        self.progress.replan(BatchPlan(old.n, self._fitting(G, world_size), G, rank, world_size, old.tail))

    def _planned(self, n: int, size: int, G: int, rank: int, world_size: int, tail: Tail) -> BatchPlan:
        """The plan with the master's shares, if they are for so many micro-batches."""
        plan = BatchPlan(n, size, G, rank, world_size, tail)
        shares = uneven_shares(self._told, plan.total, world_size)
        return msgspec.structs.replace(plan, shares=shares) if shares else plan

    def _fitting(self, global_batch_size: int, world_size: int) -> int:
        """The micro-batch: as given, or smaller, so that the global batch stays and each rank has its share."""
        size = fitting(self._batch_size, global_batch_size, world_size)
        if not size:
            return self._batch_size  # not valid: `BatchPlan` raises with the reason
        if size != self._batch_size:
            log.warning(
                "micro-batches of %d instead of batch_size=%d: so %d workers can share the global batch of %d (to "
                "change that, give global_batch_size=)", size, self._batch_size, world_size, global_batch_size,
            )  # fmt: skip
        return size

    def rollback(self) -> None:
        """Return to the last commit, together with the model. The next iterator replays everything after it."""
        self._must_be_idle("rollback")
        self.progress.rewind(self.plan, self.cursor)

    def state_dict(self) -> dict[str, Any]:
        """The committed position and the order that it refers to. The same on every rank; save it once.

        ~150 bytes of JSON.
        """
        if self.progress.issued and not self.progress.counted and not self._warned:
            self._warned = True
            log.warning(
                "the sampler's state does not move: on_batch, mark and commit are not called (use elastic_loader)"
            )
        return saved_position(self.order, self.cursor, self.plan.tail, self.plan.global_batch_size)

    def handover(self) -> dict[str, Any]:
        """The state for a sampler that replaces this one between two steps (a reloaded loader). Marked steps count. An
        epoch with at least one step is over; one without (trial steps) begins again.
        """
        progress = self.progress
        trained = progress.marked > progress.base
        return self.state_dict() | {"cursor": progress.following() if trained else progress.marked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the state's cursor with the next iterator. G comes from the state unless it was given explicitly.

        Raises DataMismatch (nothing is changed) if the state is of other data, UsageError while an iterator is live.
        """
        self._must_be_idle("load_state_dict")
        refuse_other(state, self.order)
        G = self.plan.global_batch_size if self._explicit else state["G"]
        if state["G"] != G:
            log.warning("global_batch_size=%d was given: the state's %d is not used", G, state["G"])
        if state.get("tail") != self.plan.tail:
            log.warning("tail=%r is used: the state was made with %r", self.plan.tail, state.get("tail"))
        old = self.plan
        plan = self._planned(old.n, self._fitting(G, old.world_size), G, old.rank, old.world_size, old.tail)
        self._settled, self.restored = True, state["cursor"] > 0
        self.progress.rewind(plan, state["cursor"])

    def _must_be_idle(self, verb: str) -> None:
        if self._live is not None:
            raise UsageError(
                f"{verb}() while an iterator of this sampler is live: it would continue with the old order",
                hint="leave the loop first (or close()), then restore, then iterate",
            )


def _length(dataset: Sized) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise UsageError(
            f"the dataset ({type(dataset).__name__}) has no length: visited exactly once cannot be promised",
            hint="give a map-style dataset or its length; an iterable one keeps its own state",
        ) from error


def _world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """(world size, rank): as given, else from the process group, else from the environment, else one process."""
    if dist.is_available() and dist.is_initialized():
        found = dist.get_world_size(), dist.get_rank()
    else:
        here = config.place()
        found = here.world_size, here.rank
    if num_replicas is None:
        return found[0], found[1] if rank is None else rank
    return num_replicas, (0 if num_replicas == 1 else found[1]) if rank is None else rank


def _told_shares(world_size: int) -> Shares | None:
    """The shares of this round, for a sampler of its world; the same on every rank."""
    here = config.place()
    return here.shares if here.world_size == world_size else None


def _positions(plan: BatchPlan, q: int) -> Iterator[Indices]:
    """In-epoch positions of this rank's samples from q to the end of the epoch, complete steps at a time."""
    width, G = plan.micro_batches * plan.batch_size, plan.global_batch_size
    steps, first = plan.full_steps(q), q + plan.before * plan.batch_size
    chunk, place = max(1, CHUNK // width), np.arange(width)
    for done in range(0, steps, chunk):
        starts = first + G * np.arange(done, min(done + chunk, steps))
        yield np.reshape(starts[:, None] + place, -1)
    if plan.has_tail(q):
        last = plan.step(q + steps * G)
        yield np.arange(last.lo, last.hi)
