"""Functions of roles that use hooks of several kinds, for tests/contracts/test_job_backends.py."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from dlrover_hooks import ShardDataset, elastic_loader, elastic_run
from dlrover_hooks.job import current_worker


def _note(name: str, text: str) -> None:
    """Write a line. After the fifth, wait until the test creates the file `go-NAME`."""
    folder = Path(current_worker().config["folder"])
    with open(folder / f"{name}-{os.getpid()}", "a+") as file:
        file.write(f"{text}\n")
        file.seek(0)
        written = len(file.readlines())
    while written == 5 and not (folder / f"go-{name}").exists():
        threading.Event().wait(0.02)


@elastic_run
def lightning() -> None:
    """Train two epochs of 400 numbers, at any world size."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from dlrover_hooks.integrations.lightning import ElasticCallback

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            (numbers,) = batch
            _note("lightning", f"{self.global_step} {' '.join(str(int(one)) for one in numbers)}")
            return self.layer(numbers.view(-1, 1) / 1000).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), max_epochs=2,
        callbacks=[ElasticCallback(save_every=1)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.arange(400.0)), batch_size=4, shuffle=True))


def shards() -> None:
    """Read the numbers below 400 as shards, which the master leases to the workers."""
    from torch.utils.data import DataLoader

    from dlrover_hooks.data.leased.sources import Table

    loader = elastic_loader(DataLoader(ShardDataset(Table(400)), batch_size=4))
    for numbers in loader:
        _note("shards", " ".join(str(int(one)) for one in numbers))
        loader.mark()
