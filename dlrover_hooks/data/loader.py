"""`elastic_loader(loader)`: lets a DataLoader stop at any step and continue at any world size.

    loader = elastic_loader(loader, optimizer=optimizer)
    for epoch in loader.epochs(3):
        for batch in loader: ...

Batches are counted as the loop receives them, so prefetching and worker processes do not matter. The optimizer's
step marks, the next request of a batch commits: this is the *step boundary*, the moment a step is entirely over.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torch.utils.hooks import RemovableHandle

from dlrover_hooks import config
from dlrover_hooks.data.batch_plan import BatchPlan, Tail
from dlrover_hooks.data.batch_sampler import END, Batches
from dlrover_hooks.data.implicit_accumulation import Accumulation, accumulation_of
from dlrover_hooks.data.leased.leased_loader import is_leased, leased_loader
from dlrover_hooks.data.optimizer_step_hook import mark_on_step
from dlrover_hooks.data.order import Kind
from dlrover_hooks.data.sampler import ElasticSampler
from dlrover_hooks.data.unsupported_loaders import refusal
from dlrover_hooks.errors import UsageError

log = logging.getLogger(__name__)
_torch = cast(Any, torch_data)
"""Its collate functions have no complete types."""


def elastic_loader(
    loader: DataLoader[Any] | ElasticLoader,
    *,
    optimizer: Optimizer | None = None,
    global_batch_size: int | None = None,
    order: Kind | None = None,
    block: int | None = None,
    window: int | None = None,
    seed: int = 0,
    tail: Tail | None = None,
    seed_samples: bool = True,
    fixed_length: bool = False,
    name: str = "train",
    accumulation: Literal["auto", "manual"] = "auto",
    num_replicas: int | None = None,
    rank: int | None = None,
) -> ElasticLoader:
    """`loader` with an `ElasticSampler`; everything else is kept, and the given loader is not changed.

    Args:
        loader: over a map-style dataset or a ShardDataset; see `ElasticLoader` for samplers that yield batches.
        optimizer: its steps mark; without it, call `sampler.mark()`.
        accumulation: "auto": the loop steps after each batch, see `Accumulation`; "manual": it steps at `step_ends`.
        global_batch_size: samples per step over all ranks; None = from the environment, else as at the first start.
        order, block, window, seed: see `dlrover_hooks.data.order`; None = as the loader shuffles.
        tail: None = "drop" if the loader has drop_last, else "ghost"; "carry" for loops that need no fixed length.
        seed_samples: random numbers drawn by the dataset come from (seed, position), see `data.sample_seeds`.
        fixed_length: refuse a loader whose epochs differ in length.
        name: of the loader, in the checkpoint; different for each of several loaders.
        num_replicas, rank: None = from the process group or the environment.

    A present ElasticSampler is kept, with its sizes, order, seed and tail. Raises UsageError, see `supports`.
    """
    if is_leased(loader):  # same methods, no sampler; the other arguments are ShardDataset's
        return cast(Any, leased_loader(cast(Any, loader), optimizer))
    if isinstance(loader, ElasticLoader):
        made = loader
    else:
        if (refused := refusal(loader)) is not None:
            raise UsageError(refused.reason, hint=refused.hint)
        sampler = cast(Any, loader).sampler
        if not isinstance(sampler, ElasticSampler):
            sampler = _elastic(loader, order, block, window, global_batch_size, seed, tail, num_replicas, rank)
        made = ElasticLoader(with_sampler(loader, sampler, seed_samples), sampler, name=name)
    if fixed_length and not made.fixed_length:
        raise _no_fixed_length(made.name)
    made.take_part(optimizer, by_hand=accumulation == "manual")
    return made


def _no_fixed_length(name: str) -> UsageError:
    return UsageError(
        f'loader {name!r} has tail="carry": epochs differ in length by a step, and this loop counts on one',
        hint='use tail="ghost" (the default) or tail="drop"',
    )


def supports(loader: object) -> str | None:
    """None if `elastic_loader` supports this loader, else the reason and a hint (one text)."""
    if isinstance(loader, ElasticLoader):
        return None
    refused = refusal(loader)
    return None if refused is None else f"{refused.reason}\nHINT: {refused.hint}"


class ElasticLoader:
    """A DataLoader whose position is one integer. Main thread only. Other attributes are the inner DataLoader's.

    With an `ElasticSampler(..., yield_batches=True)` an entire micro-batch is requested from the dataset, by an int64
    array: `dataset.__getitems__(ids)` if the dataset has that (a returned list is collated, anything else is a batch),
    else `dataset[ids]`.

    `before_batch`: functions called at every step boundary, after the commit and before the next batch is fetched.
    `after_batch`: functions called when it is fetched, before the loop receives it.
    """

    def __init__(self, inner: DataLoader[Any], sampler: ElasticSampler, *, name: str = "train") -> None:
        self.inner = inner
        self.sampler = sampler
        self.name = name
        self.before_batch: list[Callable[[], object]] = []
        self.after_batch: list[Callable[[], object]] = []
        feeding: Any = inner
        self._feed = cast(Batches, feeding.sampler if isinstance(feeding.sampler, Batches) else feeding.batch_sampler)
        self._marks: list[RemovableHandle] = []
        self.leads = True
        """The loop's epochs are this loader's: neither a framework's nor those of a loader that it is zipped with."""
        self._counting, self._said = False, set[str]()
        self._logged: BatchPlan | None = None
        """The plan that was logged last."""
        self._accumulation: Accumulation | None = None
        self.by_hand = False
        """The loop steps at `step_ends`, and weights its losses."""
        self.evened = False
        """It is inside an `EvenLoader`: each rank runs equally many batches."""
        self._source: Iterator[Any] | None = None
        self._live: object | None = None
        self._fetching = False
        sampler.progress.counted = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        """Micro-batches of this rank in a COMPLETE epoch, also after a resume: loops compare saved counts with it."""
        return self.sampler.micro_batches()

    @property
    def fixed_length(self) -> bool:
        """See `ElasticSampler.fixed_length`."""
        return self.sampler.fixed_length

    def __iter__(self) -> Iterator[Any]:
        """Iterate the rest of the epoch after a restore, else an epoch. A newer iterator ends an older one.

        An epoch begins with its first step: looking at a batch (`next(iter(loader))`) changes nothing.
        """
        self.close()  # before the new iterator, which with num_workers > 0 draws from the sampler at once
        self._begin()
        self._log_plan()
        token = self._live = object()
        self._renewed()
        return self._batches(token)

    def _log_plan(self) -> None:
        """Not before the first epoch: until then a restore, or the world, may change the plan."""
        plan = self.sampler.plan
        if plan != self._logged and (plan.world_size > 1 or self._logged is not None):
            log.info("loader %r: %s", self.name, plan.summary)
            self._logged = plan

    def _begin(self) -> None:
        progress, n, before = self.sampler.progress, self.sampler.plan.n, self.sampler.progress.base
        left = progress.marked % n if progress.leaves else 0
        start = self.sampler.begin()
        if left:
            self._say("left", "epoch %d was left at position %d of %d: the rest of it counts as trained (said once)",
                      before // n, left, n)  # fmt: skip
        if start > before and self.sampler.restored and self.leads and not self._counting:
            self._say("range", "a run that was restored in epoch %d begins epoch %d outside of loader.epochs(n): a "
                      "loop over range(n) now trains more epochs than n; write `for epoch in loader.epochs(n):`",
                      before // n, start // n)  # fmt: skip

    def _say(self, what: str, text: str, *numbers: int) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("loader %r: " + text, self.name, *numbers)

    def _batches(self, token: object) -> Iterator[Any]:
        try:
            while not self.sampler.progress.finished:
                if self._live is not token:
                    raise UsageError("this iterator ended: the loader was iterated, restored or closed meanwhile")
                self._fetching = True
                self._quiet()
                yield self._fetch(self._renewed() if self._source is None else self._source)
            if self._source is not None:
                next(self._source, None)  # lets DataLoader end its workers before the epoch's validation
        finally:
            if self._live is token:
                self.close()

    def _quiet(self) -> None:
        if self._accumulation is not None:
            self._accumulation.requested()
        self.sampler.progress.commit()
        for call in tuple(self.before_batch):
            call()

    def _renewed(self) -> Iterator[Any]:
        """A new inner iterator. Creating it must not consume the loop's random numbers: a restored run may create
        more or fewer iterators than an undisturbed run.
        """
        state = torch.get_rng_state()
        self._source = _fetched_here(self.inner) if _fetches_alone(self.inner) else iter(self.inner)
        torch.set_rng_state(state)
        return self._source

    def _fetch(self, source: Iterator[Any]) -> Any:
        batch = self._feed.fetch(source)
        if batch is END:
            raise UsageError(
                f"loader {self.name!r} ended its epoch early, at position {self.sampler.progress.position()}",
                hint="the inner DataLoader must not drop or regroup samples (drop_last, batch_size)",
            )
        self.sampler.progress.on_batch()
        if self._accumulation is not None:
            self._accumulation.received(self)
        for call in self.after_batch:
            call()
        return batch

    def epochs(self, n: int) -> Iterator[int]:
        """The remaining epochs of n, including an interrupted one: over restarts exactly n (`range(n)` would repeat).

        Iterate the loader once in each. After the last one there is a step boundary too.
        """
        began, self._counting = -1, True
        while (epoch := (start := self.sampler.progress.following()) // self.sampler.plan.n) < n:
            if start == began:
                raise UsageError(
                    f"the body of epochs({n}) did not iterate the loader in epoch {epoch}, or made no step of it",
                    hint="elastic_loader(..., optimizer=optimizer), or loader.sampler.mark() after each step",
                )
            began = start
            yield epoch
        if began >= 0:
            self._begin()  # the last epoch may have been left early: it is over too
            self.finish()

    def finish(self) -> None:
        """Training ended: the last step boundary. `epochs` calls it; other loops should, before their last save.

        After a loop that was left in mid-epoch (max_steps) the state continues in mid-epoch.
        """
        self._quiet()

    def attach(self, optimizer: Optimizer) -> None:
        """Mark at each step of `optimizer`, and accumulate the gradients of its micro-batches (`accumulation`). The
        optimizer does not keep the loader alive. `detach` undoes it.
        """
        self._marks.append(mark_on_step(optimizer, self.sampler))
        if self._accumulation is None and not self.by_hand:
            self._accumulation = accumulation_of(optimizer)
            self._accumulation.add_loader(self)

    def take_part(self, optimizer: Optimizer | None, *, by_hand: bool) -> None:
        """Call `accumulate_by_hand` and `attach` as requested."""
        if by_hand:
            self.accumulate_by_hand()
        if optimizer is not None:
            self.attach(optimizer)

    def detach(self) -> None:
        """Stop marking at optimizer steps."""
        while self._marks:
            self._marks.pop().remove()
        self._leave_accumulation()

    def accumulate_by_hand(self) -> None:
        """The loop steps at `step_ends` and weights its losses: as `accumulation="manual"`."""
        self.by_hand = True
        self._leave_accumulation()

    def _leave_accumulation(self) -> None:
        if self._accumulation is not None:
            self._accumulation.remove_loader(self)
            self._accumulation = None

    @property
    def accumulation(self) -> Accumulation | None:
        """Makes several micro-batches one step; None if the loop does that itself."""
        return self._accumulation

    def micro_batches(self) -> tuple[int, int, bool]:
        """Of a full step: this rank's, those of all ranks, and whether they are rebalanced. Any thread.

        (0, 0, False) if ranks must not differ in them.
        """
        plan = self.sampler.plan
        return (0, 0, False) if self.evened else (plan.micro_batches, plan.total, plan.rebalanced)

    @property
    def live(self) -> bool:
        """Whether it is being iterated. False before, and when the end was reached."""
        return self._live is not None

    @property
    def weight(self) -> float:
        """See `ElasticSampler.weight`."""
        return self.sampler.weight

    @property
    def loss_scale(self) -> float:
        """See `ElasticSampler.loss_scale`."""
        return self.sampler.loss_scale

    def sample_weights(self) -> NDArray[np.float64]:
        """See `ElasticSampler.sample_weights`."""
        return self.sampler.sample_weights()

    @property
    def step_ends(self) -> bool:
        """See `ElasticSampler.step_ends`."""
        return self.sampler.step_ends

    def resize(self, world_size: int, rank: int) -> None:
        """See `ElasticSampler.resize`. A live iterator continues in the new world, after the steps it yielded.

        Batches prefetched for the old world are discarded. Call it between two steps, in the loop's body or in
        `before_batch`, at the same step on every rank.
        """
        self.sampler.close()
        live, self._source = self._live, None
        self.sampler.resize(world_size, rank)
        if live is not None:
            self._log_plan()

    def rollback(self) -> None:
        """See `ElasticSampler.rollback`."""
        self.close()
        self.sampler.rollback()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last optimizer step, which belongs to the model as it is now.

        So it may be saved beside the state of the model at any point of the loop, also right after `optimizer.step()`.
        """
        return self.sampler.state_dict() | {"cursor": self.sampler.progress.marked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ElasticSampler.load_state_dict`."""
        self._must_be_idle("load_state_dict")
        self.close()
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """End a live iterator, for example after an exception that keeps it alive. Does nothing if there is none."""
        self._live, self._fetching, self._source = None, False, None
        if self._accumulation is not None:
            self._accumulation.over()
        self.sampler.close()

    def _must_be_idle(self, verb: str) -> None:
        if self._live is not None and self._fetching:
            raise UsageError(
                f"{verb}() while loader {self.name!r} is being iterated: the loop would continue with old batches",
                hint="leave the loop first (or close()), then restore, then iterate",
            )


def _elastic(
    loader: DataLoader[Any],
    order: Kind | None,
    block: int | None,
    window: int | None,
    global_batch_size: int | None,
    seed: int,
    tail: Tail | None,
    num_replicas: int | None,
    rank: int | None,
) -> ElasticSampler:
    assert loader.batch_size is not None  # `refusal` refuses None
    old: Any = cast(Any, loader).sampler
    shuffle = True
    if isinstance(old, SequentialSampler):
        shuffle = False
    elif isinstance(old, DistributedSampler):
        shuffle, seed = old.shuffle, seed or old.seed
        if num_replicas is None:
            num_replicas, rank = old.num_replicas, old.rank if rank is None else rank
    return ElasticSampler(
        loader.dataset,  # pyright: ignore[reportArgumentType]
        batch_size=loader.batch_size,
        global_batch_size=config.global_batch_size() if global_batch_size is None else global_batch_size,
        shuffle=shuffle,
        order=order,
        block=block,
        window=window,
        seed=seed,
        tail=tail or ("drop" if loader.drop_last else "ghost"),
        num_replicas=num_replicas,
        rank=rank,
    )


def with_sampler(loader: DataLoader[Any], sampler: ElasticSampler, seeded: bool) -> DataLoader[Any]:
    """A copy with another sampler. Not constructed, so that options of newer torch and of subclasses are kept."""
    made = copy.copy(loader)
    batches = Batches(sampler, seeded=seeded, workers=loader.num_workers > 0)
    parts: dict[str, Any] = {"sampler": sampler, "batch_sampler": batches}
    if sampler.yield_batches and not callable(getattr(loader.dataset, "__getitems__", None)):
        parts = {"sampler": batches, "batch_sampler": None}  # so torch calls dataset[ids]
    elif sampler.yield_batches and cast(Any, loader).collate_fn is _torch.default_convert:
        parts["collate_fn"] = collate_samples
    vars(made).update(drop_last=False, _iterator=None, **parts)  # the sampler drops the tail
    return made


def _fetches_alone(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader's own iterator does nothing but what `_fetched_here` does."""
    kind, base = cast(Any, type(loader)), cast(Any, DataLoader)
    plain = kind.__iter__ is base.__iter__ and kind._get_iterator is base._get_iterator
    pins = loader.pin_memory and getattr(torch, "accelerator", torch.cuda).is_available()  # torch 2.6
    return plain and not loader.num_workers and not pins


def _fetched_here(loader: Any) -> Iterator[Any]:
    """The batches of a loader without worker processes.

    A DataLoader's iterator makes ten more calls for a batch, two of them operations for torch's profiler. Each costs a
    small step 1 to 2 us, as the CPU's caches hold the step's own data by then.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    if loader.batch_sampler is None:  # the sampler yields entire batches
        for ids in loader.sampler:
            yield collate(dataset[ids])
    elif take := getattr(dataset, "__getitems__", None):
        for ids in loader.batch_sampler:
            yield collate(take(ids))
    else:
        for ids in loader.batch_sampler:
            yield collate([dataset[index] for index in ids])


def collate_samples(fetched: Any) -> Any:
    """The batch of a dataset's `__getitems__` result: a list has samples, anything else is a batch already."""
    return _torch.default_collate(fetched) if isinstance(fetched, list) else _torch.default_convert(fetched)
