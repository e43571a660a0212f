"""Fixtures of leased data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from tests.unit.data.lent import JOB, Master


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def make(master: Master) -> Iterator[Callable[..., LeasedLoader]]:
    made: list[LeasedLoader] = []

    def loader(dataset: Any, b: int = 4, *, loader: dict[str, Any] | None = None, **options: Any) -> LeasedLoader:
        shards = ShardDataset(dataset, **{"shard_size": 8, **options})
        one = LeasedLoader(DataLoader(shards, b, **(loader or {})))
        one.connect(master, JOB, f"worker{len(made)}", free=True, rank=len(made))
        made.append(one)
        return one

    yield loader
    for one in made:
        one.close()
