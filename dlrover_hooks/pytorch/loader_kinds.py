"""Finds the user's training loaders, and the loaders that keep their own position."""

from __future__ import annotations

from typing import Any

import torch

from dlrover_hooks.data.leased.leased_loader import LeasedLoader, is_leased
from dlrover_hooks.data.loader import ElasticLoader, supports
from dlrover_hooks.data.sampler import ElasticSampler


def is_training(loader: Any, beside: list[Any]) -> bool:
    """True if `loader` is for training, among the loaders prepared in the same call.

    Shuffled and leased loaders are, and those that are elastic or have an ElasticSampler already. If there is none, the
    first loader is, provided that an optimizer is among `beside`.
    """
    loaders = [one for one in beside if isinstance(one, torch.utils.data.DataLoader | ElasticLoader | LeasedLoader)]
    found = [one for one in loaders if _shuffles(one)]
    if not found and any(isinstance(one, torch.optim.Optimizer) for one in beside):
        found = loaders[:1]
    return any(one is loader for one in found)


def _shuffles(loader: Any) -> bool:
    if isinstance(loader, ElasticLoader) or is_leased(loader):
        return True
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, ElasticSampler):
        return True
    return not isinstance(sampler, torch.utils.data.SequentialSampler) and getattr(sampler, "shuffle", True)


def keeps_own_state(loader: Any) -> bool:
    """True for a loader that keeps its own position, which `elastic_loader` does not wrap."""
    own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return own and not is_leased(loader) and supports(loader) is not None
