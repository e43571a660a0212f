"""`elastic_loader(loader)`: the user's DataLoader, made able to stop at any step and go on at any world size.

    loader = elastic_loader(loader, optimizer=optimizer)
    for epoch in loader.epochs(3):
        for batch in loader: ...

Batches are counted as the loop receives them, so prefetching and worker processes do not matter. The optimizer's
step marks, the next request of a batch commits: this is the *quiet point*, the moment a step is entirely over (ED-25).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.hooks import RemovableHandle

from dlrover_hooks.data.batch import Tail
from dlrover_hooks.data.marks import mark_on_step
from dlrover_hooks.data.sampler import ElasticSampler
from dlrover_hooks.errors import UsageError

_END = object()


def elastic_loader(
    loader: DataLoader[Any] | ElasticLoader,
    *,
    optimizer: Optimizer | None = None,
    global_batch_size: int | None = None,
    seed: int = 0,
    tail: Tail | None = None,
    name: str = "train",
    num_replicas: int | None = None,
    rank: int | None = None,
) -> ElasticLoader:
    """`loader` with an `ElasticSampler` in it; everything else of it is kept, and the one given is left as it was.

    tail: None = "drop" where the loader has drop_last, else "ghost". optimizer: its steps mark; without it, call
    `sampler.mark()`. A loader whose sampler is an ElasticSampler already keeps that one, and an ElasticLoader is
    returned itself; the sizes, seed and tail given here are then not used. Raises UsageError, see `supports`.
    """
    reason = supports(loader)
    if reason is not None:
        raise UsageError(*reason.split("\nHINT: ")[:1], hint=reason.partition("\nHINT: ")[2])
    if isinstance(loader, ElasticLoader):
        made = loader
    else:
        sampler = loader.sampler
        if not isinstance(sampler, ElasticSampler):
            sampler = _elastic(loader, global_batch_size, seed, tail, num_replicas, rank)
        made = ElasticLoader(_with_sampler(loader, sampler), sampler, name=name)
    if optimizer is not None:
        made.attach(optimizer)
    return made


def supports(loader: object) -> str | None:
    """None if `elastic_loader` takes this loader, else why it must be left alone and what to do (one text)."""
    if isinstance(loader, ElasticLoader):
        return None
    for wrong, why, advice in _REFUSALS:
        if wrong(loader):
            return f"{why}\nHINT: {advice}"
    return None


class ElasticLoader:
    """A DataLoader whose position is one integer. Main thread only. Attributes it lacks are the inner DataLoader's.

    before_batch: called at every quiet point, after the commit and before the next batch is fetched. before_fetch:
    called once, at the next fetch, after the inner iterator was made, because making it spends global random
    numbers: put a restored RNG back here.
    """

    def __init__(self, inner: DataLoader[Any], sampler: ElasticSampler, *, name: str = "train") -> None:
        self.inner = inner
        self.sampler = sampler
        self.name = name
        self.before_batch: list[Callable[[], object]] = []
        self.before_fetch: Callable[[], object] | None = None
        self._marks: list[RemovableHandle] = []
        self._live: object | None = None
        self._fetching = False
        sampler.progress.counted = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        """Micro-batches of this rank in a WHOLE epoch, after a resume too (loops compare restored counts with it)."""
        return self.sampler.plan.length()

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after a restore, else an epoch. A newer iterator ends an older one."""
        self.close()  # before the new one: with num_workers > 0 making it already draws from the sampler
        self.sampler.begin()
        token = self._live = object()
        return self._batches(iter(self.inner), token)

    def _batches(self, inner: Iterator[Any], token: object) -> Iterator[Any]:
        try:
            while not self.sampler.progress.finished:
                if self._live is not token:
                    raise UsageError("this iterator ended: the loader was iterated, restored or closed meanwhile")
                self._fetching = True
                self._quiet()
                yield self._fetch(inner)
            next(inner, None)  # lets DataLoader end its workers; the epoch's end (validation) is still to come
        finally:
            if self._live is token:
                self.close()

    def _quiet(self) -> None:
        self.sampler.commit()
        for call in tuple(self.before_batch):
            call()

    def _fetch(self, inner: Iterator[Any]) -> Any:
        if self.before_fetch is not None:
            restore, self.before_fetch = self.before_fetch, None
            restore()
        batch = next(inner, _END)
        if batch is _END:
            raise UsageError(
                f"loader {self.name!r} ended its epoch early, at position {self.sampler.progress.position()}",
                hint="the inner DataLoader must not drop or regroup samples (drop_last, batch_size)",
            )
        self.sampler.on_batch()
        return batch

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs left of n, an interrupted one included: over restarts exactly n (`range(n)` would repeat).

        Iterate the loader once in each. Behind the last one is a quiet point too.
        """
        epoch = -1
        while (ahead := self.sampler.progress.following() // self.sampler.plan.n) < n:
            if ahead == epoch:
                raise UsageError(f"the body of epochs({n}) did not iterate the loader in epoch {epoch}")
            epoch = ahead
            yield epoch
        if epoch >= 0:
            self.sampler.begin()  # the last epoch may have been left early: it is over all the same
            self.finish()

    def finish(self) -> None:
        """Training ended: the last quiet point. `epochs` calls it; other loops should, before their last save.

        After a loop that was left in mid-epoch (max_steps) the state continues in mid-epoch.
        """
        self._quiet()

    def attach(self, optimizer: Optimizer) -> None:
        """Mark at each step of `optimizer`. The optimizer does not keep the loader alive. `detach` undoes it."""
        self._marks.append(mark_on_step(optimizer, self.sampler))

    def detach(self) -> None:
        """Stop marking at optimizer steps."""
        while self._marks:
            self._marks.pop().remove()

    @property
    def weight(self) -> float:
        """See `ElasticSampler.weight`."""
        return self.sampler.weight

    @property
    def loss_scale(self) -> float:
        """See `ElasticSampler.loss_scale`."""
        return self.sampler.loss_scale

    @property
    def step_ends(self) -> bool:
        """See `ElasticSampler.step_ends`."""
        return self.sampler.step_ends

    def resize(self, world_size: int, rank: int) -> None:
        """See `ElasticSampler.resize`."""
        self._must_be_idle("resize")
        self.close()
        self.sampler.resize(world_size, rank)

    def state_dict(self) -> dict[str, Any]:
        """The committed state: see `ElasticSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ElasticSampler.load_state_dict`."""
        self._must_be_idle("load_state_dict")
        self.close()
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """End a live iterator, after an exception that keeps it alive for example. A no-op when there is none."""
        self._live, self._fetching = None, False
        self.sampler.close()

    def _must_be_idle(self, verb: str) -> None:
        if self._live is not None and self._fetching:
            raise UsageError(
                f"{verb}() while loader {self.name!r} is being iterated: the loop would go on with old batches",
                hint="leave the loop first (or close()), then restore, then iterate",
            )


def _elastic(
    loader: DataLoader[Any],
    global_batch_size: int | None,
    seed: int,
    tail: Tail | None,
    num_replicas: int | None,
    rank: int | None,
) -> ElasticSampler:
    assert loader.batch_size is not None  # `supports` refused it
    old, shuffle = loader.sampler, True
    if isinstance(old, SequentialSampler):
        shuffle = False
    elif isinstance(old, DistributedSampler):
        shuffle, seed = old.shuffle, seed or old.seed
        if num_replicas is None:
            num_replicas, rank = old.num_replicas, old.rank if rank is None else rank
    return ElasticSampler(
        loader.dataset,  # pyright: ignore[reportArgumentType]
        batch_size=loader.batch_size,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        seed=seed,
        tail=tail or ("drop" if loader.drop_last else "ghost"),
        num_replicas=num_replicas,
        rank=rank,
    )


def _with_sampler(loader: DataLoader[Any], sampler: ElasticSampler) -> DataLoader[Any]:
    """A copy with another sampler. Copied, not constructed anew: options of newer torch and of subclasses survive."""
    made = copy.copy(loader)
    batches = BatchSampler(sampler, sampler.plan.batch_size, drop_last=False)  # the sampler itself drops
    vars(made).update(sampler=sampler, batch_sampler=batches, drop_last=False, _iterator=None)
    return made


def _keeps_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _own_batches(loader: Any) -> bool:
    return loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler


def _own_order(loader: Any) -> bool:
    sampler = loader.sampler
    if isinstance(sampler, ElasticSampler):
        return False
    if type(sampler) is RandomSampler:
        return sampler.replacement or len(sampler) != len(loader.dataset)
    return type(sampler) not in (SequentialSampler, DistributedSampler)


def _disagrees(loader: Any) -> bool:
    sampler = loader.sampler
    return isinstance(sampler, ElasticSampler) and (
        loader.batch_size != sampler.plan.batch_size or (loader.drop_last and not sampler.drop_last)
    )


_REFUSALS: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (
        _keeps_state,
        "the loader keeps a state of its own (state_dict, load_state_dict): exactly-once is then its promise",
        "use it as it is and save its state with the checkpoint",
    ),
    (
        lambda loader: not isinstance(loader, DataLoader),
        "not a torch DataLoader: its samples cannot be placed, so nothing is promised about them",
        "give a torch.utils.data.DataLoader over a map-style dataset",
    ),
    (
        _iterable,
        "an IterableDataset chooses its own samples: visited exactly once cannot be promised",
        "use a map-style dataset, or an iterable one that keeps its own state",
    ),
    (
        lambda loader: not getattr(loader, "in_order", True),
        "in_order=False hands batches out in any order: which samples a step had is then unknown",
        "use in_order=True (the default)",
    ),
    (
        _own_batches,
        "batch_size=None or a batch_sampler of your own decides what a batch is: the fixed global batch would not hold",
        "give batch_size=..., and grouping to the collate_fn",
    ),
    (
        _own_order,
        "a sampler of your own decides the order: visited exactly once, at any world size, would not hold",
        "use shuffle=True or False; weights and subsets belong into the dataset (torch.utils.data.Subset)",
    ),
    (
        _disagrees,
        "the loader's batch_size or drop_last is not that of its ElasticSampler: steps would not be whole",
        "give both the same batch_size, and tail='drop' instead of drop_last=True",
    ),
)
