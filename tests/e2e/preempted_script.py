"""Run by test_preemption.py under the launcher: DDP, random numbers in data and model, a few epochs.

Usage: preempted_script.py NOTES SAVE_TO [lightning]. Each line of NOTES is one JSON object.
"""

import hashlib
import json
import os
import select
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader
from dlrover_hooks.session import Preempted


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index % 7)) + torch.randn(4)


def note(**more: Any) -> None:
    line = json.dumps({"pid": os.getpid(), "rank": dist.get_rank(), **more})
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    os.write(fd, (line + "\n").encode())
    os.close(fd)


def left(gone: Preempted) -> None:
    note(left=gone.step, durable=gone.durable, reason=gone.reason)


def train(**options: Any) -> tuple[str, int]:
    """Weights and steps at the end."""
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = elastic_loader(DataLoader(Noisy(), batch_size=2, num_workers=1), optimizer=optimizer)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, **options) as saves:
        note(restored=saves.step)
        for _ in loader.epochs(2):
            for batch in loader:
                loss = model(batch).square().mean() * loader.loss_scale
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                note(step=saves.step)
                select.select([], [], [], 0.02 if saves.session else 0)  # so that a signal finds it in the middle
    state = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return hashlib.sha256(state).hexdigest(), saves.step


def fit() -> None:
    """The same with Lightning: its own handler of SIGTERM would broadcast, and wait for the other rank for ever."""
    from lightning.pytorch import LightningModule, Trainer

    from dlrover_hooks.integrations.lightning import ElasticCallback

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            note(step=self.global_step)
            select.select([], [], [], 0.02)
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    elastic, model = ElasticCallback(save_to=sys.argv[2], on_preempt=left), Net()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", callbacks=[elastic], **quiet)
    trainer.fit(model, DataLoader(Noisy(), batch_size=2, num_workers=1, shuffle=True))
    note(end=trainer.global_step)


def main() -> None:
    if sys.argv[3:] == ["lightning"]:
        fit()
        return
    dist.init_process_group("gloo")
    weights, end = train(save_to=sys.argv[2], on_preempt=left)
    note(weights=weights, end=end, undisturbed=train(disable=True)[0])


if __name__ == "__main__":
    main()
