"""Which of a user's loaders are for training, and which keep a place of their own."""

from __future__ import annotations

from typing import Any

import torch

from dlrover_hooks.data.leased.leased_loader import LeasedLoader, is_leased
from dlrover_hooks.data.loader import ElasticLoader, supports
from dlrover_hooks.data.sampler import ElasticSampler


def is_training(loader: Any, beside: list[Any]) -> bool:
    """Is `loader` for training, among the loaders handed over in the same call?

    The shuffled and the leased ones are, and those that are elastic or have an ElasticSampler already. If there is
    none, the first one is, provided that an optimizer comes along.
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
    """A loader with a place of its own, which `elastic_loader` leaves alone."""
    own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return own and not is_leased(loader) and supports(loader) is not None
