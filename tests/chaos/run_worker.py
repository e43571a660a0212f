"""A worker of a chaos run: DDP over gloo, two DataLoader workers, and a model that counts each sample's visits.

Beside the count it trains a small net with dropout and momentum, so that random state and moments matter too. At the
end each rank appends one line of JSON to the file named by its first argument.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_hooks import AsyncCheckpointer, elastic_loader
from tests.pace import pace

SAMPLES, BATCH, WORLD = 115, 3, 2
G = BATCH * WORLD
STEPS_PER_EPOCH = -(-SAMPLES // G)
"""The last one is short."""


class Counting(nn.Module):
    """The loss falls with each visit: a sample's weight grows by the learning rate over the step's size."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids[:, None] / SAMPLES).pow(2).mean() - self.visits[ids].mean()


def train(epochs: int) -> tuple[int, list[float]]:
    """Steps, and how often each sample was trained."""
    model = Counting()
    ddp = DistributedDataParallel(model)
    counting = {"params": [model.visits], "lr": 1.0, "momentum": 0.0}
    optimizer = torch.optim.SGD([counting, {"params": model.net.parameters()}], lr=0.01, momentum=0.9)
    numbers: Any = range(SAMPLES)  # a map-style dataset to torch, though not to its types
    plain: Any = DataLoader(numbers, BATCH, shuffle=True, num_workers=2)
    loader: Any = elastic_loader(plain, optimizer=optimizer, global_batch_size=G)
    often: dict[str, Any] = {"save_every": 1, "persist_every": 10}  # a keeper's death costs what is not durable yet
    with AsyncCheckpointer("saved", model=ddp, optimizer=optimizer, loader=loader, **often) as saving:
        for _ in loader.epochs(epochs):
            for ids in loader:
                short = (saving.step + 1) % STEPS_PER_EPOCH == 0
                optimizer.param_groups[0]["lr"] = float(SAMPLES % G or G) if short else float(G)
                ddp(ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        return saving.step, model.visits.tolist()


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    pace()
    dist.init_process_group("gloo")
    steps, visits = train(int(sys.argv[2]))
    with Path(sys.argv[1]).open("a") as file:
        file.write(json.dumps({"rank": dist.get_rank(), "steps": steps, "visits": visits}) + "\n")
    dist.destroy_process_group()
