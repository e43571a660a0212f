"""Which DataLoaders over a `ShardDataset` contradict the leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.errors import UsageError


def checked(loader: DataLoader[Any]) -> ShardDataset:
    """The loader's ShardDataset. Raises UsageError for a loader that contradicts the leases."""
    for wrong, why, advice in _REFUSALS:
        if wrong(loader):
            raise UsageError(f"a DataLoader over a ShardDataset: {why}", hint=advice)
    dataset: Any = loader.dataset
    return dataset


def _other_sampler(loader: Any) -> bool:
    if type(loader.sampler) is RandomSampler:
        return loader.sampler.replacement
    return type(loader.sampler) is not SequentialSampler


_REFUSALS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        lambda loader: loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler,
        "what a batch is must be said by batch_size",
        "give batch_size=..., and grouping to the collate_fn",
    ),
    (
        _other_sampler,
        "the master decides who gets which sample, not a sampler",
        "leave sampler= out; weights and subsets belong into the dataset (torch.utils.data.Subset)",
    ),
    (
        lambda loader: type(loader.sampler) is RandomSampler and not loader.dataset.shuffle,
        "shuffle=True contradicts ShardDataset(shuffle=False)",
        "say it once, in ShardDataset",
    ),
    (lambda loader: loader.drop_last, "drop_last=True would drop samples at the end of each lease", "leave it out"),
    (
        lambda loader: not getattr(loader, "in_order", True),
        "in_order=False hands batches out in any order: what is in the model would be unknown",
        "use in_order=True (the default)",
    ),
)
