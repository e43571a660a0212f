"""What every adapter must do, as one small training run: the protocol `Trial`, what it is given and what it reports.

A framework joins the contract with one file `<framework>_trial.py` that has a `train(given, crash)`, and a row in
`run_trials.py`. Data, model and optimizer are made here, so that trials of two frameworks can be compared, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.data.leased.shard_dataset import ShardDataset

EVALUATED = 9
OWN_LENGTH = 40


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Sizes are chosen so that epochs end in short steps."""

    job: str
    world: int = 1
    rank: int = 0
    epochs: int = 2
    samples: int = 23
    batch: int = 2
    accumulate: int = 1
    """Micro-batches per step and rank, as the user of the framework writes it."""
    leave: int = 0
    """Steps after which the loop leaves each epoch (`break`, `limit_train_batches`); 0: never."""
    second: int = 0
    """Samples of a second training loader, zipped with the first; 0: there is none."""
    mute: bool = False
    """Only the last loader's samples have a loss."""
    own: bool = False
    """Beside them a loader that keeps its own state."""
    leased: bool = False
    """The data comes in shards that the master lends out."""
    noise: bool = True
    """Random numbers in data and model; without them runs at two world sizes can be compared."""
    shared: dict[str, Any] = {}
    """More shared keywords."""
    options: dict[str, Any] = {}
    """For the framework's own trainer, where it has one."""


class Report(msgspec.Struct):
    """What one life did. Ids are those with a weight, by (epoch, step, loader)."""

    seen: list[tuple[int, int, str, int]] = []
    evaluated: list[list[int]] = []
    evaluated_at: list[int] = []
    """The steps behind which a framework's own loop evaluated."""
    own: list[int] = []
    step: int = 0
    restored: int | None = None
    crashed: bool = False
    weights: list[float] = []
    moments: list[float] = []
    lr: list[float] = []
    untouched: bool = True
    """Evaluation loaders and loaders with a state of their own reached the loop as the objects that were given."""
    active: bool = True
    """Was there a session?"""

    def note(self, epoch: int, step: int, loader: str, ids: torch.Tensor) -> None:
        """A batch is about to be trained on."""
        self.seen += [(epoch, step, loader, one) for one in ids.tolist()]

    def end(self, net: nn.Module, optimizer: Any, schedule: Any) -> None:
        """Training is over: everything that must be equal."""
        self.weights = [value for tensor in net.state_dict().values() for value in tensor.flatten().tolist()]
        self.moments = [
            value for state in optimizer.state.values() for one in state.values() for value in one.flatten().tolist()
        ]
        self.lr = list(schedule.get_last_lr())


class Trial(Protocol):
    """Builds everything, resumes what the job has, trains; `crash`: an exception in that step's first forward."""

    def __call__(self, given: Given, crash: int | None) -> Report: ...


class Crash(Exception):
    pass


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


def keywords(given: Given) -> dict[str, Any]:
    """The shared keywords of every trial."""
    return {"job": given.job, "save_every": 1, **given.shared}
