"""What every adapter must do, as one small training run: data, model and optimizer in torch.

A framework joins the contract with one file `<framework>_trial.py` that has a `train(given, crash)`, see `Trial` in
`report.py`, and a row in `run_trials.py`. Trials of two torch frameworks can be compared, because these are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from tests.contracts.report import EVALUATED, Crash as Crash, Given, Report as Report, keywords as keywords

OWN_LENGTH = 40


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Float64 rows that differ by index; noisy ones draw from the global random state, as many augmentations do."""

    def __init__(self, n: int, noise: bool) -> None:
        self.n, self.noise = n, noise

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.tensor([index / self.n, (index * 7 % 11) / 11, (index * 3 % 5) / 5, 1.0], dtype=torch.float64)
        return row + 0.01 * torch.randn(4, dtype=torch.float64) if self.noise else row, index


class Own:
    """A stream with a place of its own, as torchdata, litdata or streaming have it. Ends and goes on."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return OWN_LENGTH

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(OWN_LENGTH):
            self.at += 1
            yield torch.tensor([self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Setup:
    """What a user's script makes before the framework comes in."""

    def __init__(self, given: Given, seed: int = 5) -> None:
        torch.manual_seed(seed)
        drop = nn.Dropout(0.3 if given.noise else 0.0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), drop, nn.Linear(8, 1)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.8)
        rows = Numbers(given.samples, given.noise)
        lent = ShardDataset(rows, shard_size=5, epochs=given.epochs) if given.leased else None
        self.train = DataLoader(lent or rows, given.batch, shuffle=lent is None)
        self.second = (
            DataLoader(Numbers(given.second, given.noise), given.batch, shuffle=True) if given.second else None
        )
        self.own = Own() if given.own else None
        self.evaluation = DataLoader(Numbers(EVALUATED, False), given.batch)

    @property
    def loaders(self) -> list[Any]:
        """All training loaders, in the order in which the loop zips them."""
        return [one for one in (self.train, self.second, self.own) if one is not None]


def loss_of(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean over the samples of a micro-batch."""
    return (model(x).squeeze(1) - (ids % 3) / 3).square().mean()


def joint_loss(given: Given, model: Any, batches: list[Any]) -> torch.Tensor:
    """Of all loaders' micro-batches; of the last one's alone where `mute` is given."""
    losses = [loss_of(model, *batch) for batch in batches]
    return torch.stack([loss * 0.0 for loss in losses[:-1]] + losses[-1:] if given.mute else losses).sum()
