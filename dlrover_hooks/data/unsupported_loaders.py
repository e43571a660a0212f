"""DataLoaders that `elastic_loader` does not support, with the reason and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dlrover_hooks.data.batch_sampler import Batches
from dlrover_hooks.data.sampler import ElasticSampler


class LoaderRefusal(NamedTuple):
    """Why a loader is not supported, and what to do."""

    reason: str
    hint: str


def refusal(loader: object) -> LoaderRefusal | None:
    """None if `loader` is supported, that is if each sample can be visited exactly once."""
    for wrong, reason, hint in _REFUSALS:
        if wrong(loader):
            return LoaderRefusal(reason, hint)
    return None


def _keeps_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _own_batches(loader: Any) -> bool:
    if loader.batch_size is None:
        return loader.batch_sampler is not None or not _yields_batches(loader)
    return type(loader.batch_sampler) not in (BatchSampler, Batches)


def _batches_twice(loader: Any) -> bool:
    return loader.batch_size is not None and _yields_batches(loader)


def _yields_batches(loader: Any) -> bool:
    return isinstance(loader.sampler, ElasticSampler) and loader.sampler.yield_batches


def _own_order(loader: Any) -> bool:
    sampler = loader.sampler
    if isinstance(sampler, ElasticSampler):
        return False
    if type(sampler) is RandomSampler:
        return sampler.replacement or len(sampler) != len(loader.dataset)
    return type(sampler) not in (SequentialSampler, DistributedSampler)


def _disagrees(loader: Any) -> bool:
    sampler = loader.sampler
    if loader.batch_size is None or not isinstance(sampler, ElasticSampler):
        return False
    return loader.batch_size != sampler.plan.batch_size or (loader.drop_last and not sampler.drop_last)


_REFUSALS: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (
        _keeps_state,
        "the loader keeps a state of its own (state_dict, load_state_dict): exactly-once is then its promise",
        "use it as it is: AsyncCheckpointer(loader=loader) keeps its state, as the callbacks of frameworks do",
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
        "give batch_size=..., and grouping to the collate_fn; or sampler=ElasticSampler(..., yield_batches=True)",
    ),
    (
        _batches_twice,
        "the sampler yields whole batches already (yield_batches=True), and batch_size groups them once more",
        "give batch_size=None to the DataLoader, or leave yield_batches out",
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
