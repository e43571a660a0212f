"""A training script for rehearsals: good, or with some of the mistakes that people make.

dlrover-hooks rehearse tests/e2e/rehearsed.py range,twice
"""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader

MISTAKES = set(sys.argv[1].split(","))
EPOCHS = 3


def main() -> None:
    torch.manual_seed(0)
    if several := int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model) if several else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    dataset = TensorDataset(torch.randn(75, 8), torch.randn(75, 1))
    loader: Any = elastic_loader(DataLoader(dataset, 5, shuffle=True), optimizer=optimizer)
    average: Any = copy.deepcopy(model).requires_grad_(False)  # a part of the loss in `outside`
    with AsyncCheckpointer("saved", model=wrapped, optimizer=optimizer, loader=loader, save_every=1) as saving:
        for _ in range(EPOCHS) if MISTAKES & {"range", "unwrapped"} else loader.epochs(EPOCHS):
            rows = DataLoader(dataset, 5) if "unwrapped" in MISTAKES else loader
            for inputs, targets in fetched_ahead(rows) if "ahead" in MISTAKES else rows:
                loss = step(wrapped, inputs, targets)
                if "outside" in MISTAKES:
                    loss = loss + nn.functional.mse_loss(model[0](inputs), average[0](inputs))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if "outside" in MISTAKES:
                    average[0].weight.data.lerp_(model[0].weight.data, 0.1)
                if "twice" in MISTAKES and os.environ["RANK"] == "0":
                    with Path("metrics.csv").open("a") as file:
                        file.write(f"{saving.step}\n")
    if several:
        dist.destroy_process_group()


def fetched_ahead(rows: Any) -> Iterator[Any]:
    """As nanoGPT does: the next batch is requested before the optimizer steps on the one at hand."""
    rows = iter(rows)
    following = next(rows, None)
    while following is not None:
        batch, following = following, next(rows, None)
        yield batch


def step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if "noise" in MISTAKES:
        inputs = inputs + random.SystemRandom().random() / 10
    return nn.functional.mse_loss(model(inputs), targets)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main()
