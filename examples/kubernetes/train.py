"""A Lightning script that gets one callback; job.yaml beside it runs it in Pods of a Kubernetes cluster."""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks.integrations.lightning import ElasticCallback


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, target = batch
        loss = nn.functional.mse_loss(self.layers(features), target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    seed_everything(1)
    features = torch.randn(4096, 16)
    data = TensorDataset(features, features.sin().sum(1, keepdim=True))
    trainer = Trainer(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp",
                      max_epochs=given.epochs, callbacks=[ElasticCallback(global_batch_size=64)], logger=False,
                      enable_checkpointing=False)  # fmt: skip
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
