"""A real worker on leased shards: appends each batch it trained on to a log, one JSON line before each step.

    python -m tests.e2e.shards_worker LOG --n 1000 [--rank 0 --store FILE]

With --store the workers are ranks of one gloo group and train in step.
"""

from __future__ import annotations

import argparse
import json
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dlrover_hooks import ShardDataset, elastic_loader
from dlrover_hooks.data.leased.sources import Table
from dlrover_hooks.errors import DataMismatch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--shard", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--store")
    parser.add_argument("--good", type=int, default=0)
    return parser.parse_args()


class Rows(Table):
    """Numbers; after `good` of them the data is found to have changed since it was split (0: never)."""

    def __init__(self, n: int, good: int) -> None:
        super().__init__(n)
        self.good, self.read = good, 0

    def __getitem__(self, index: int) -> int:
        self.read += 1
        if self.good and self.read > self.good:
            raise DataMismatch(f"row {index} changed since it was split")
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [self[index] for index in indices]


def main() -> None:
    given = arguments()
    if given.store:
        dist.init_process_group("gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.world)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    shards = ShardDataset(Rows(given.n, given.good), shard_size=given.shard)
    loader: Any = elastic_loader(
        DataLoader(shards, batch_size=given.batch, num_workers=given.workers), optimizer=optimizer
    )
    train(loader, optimizer, given)
    loader.close()
    if given.store:
        dist.destroy_process_group()


def train(loader: Any, optimizer: Any, given: argparse.Namespace) -> None:
    with given.log.open("a") as log:
        for epoch in loader.epochs(given.epochs):
            for batch in loader:
                select.select([], [], [], given.step_s)  # the step's work
                log.write(json.dumps([epoch, batch.tolist(), loader.weight]) + "\n")
                log.flush()
                optimizer.step()


if __name__ == "__main__":
    main()
