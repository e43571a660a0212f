"""A small GPT reads Python's own standard library under Lightning. One worker dies; the others do not restart.

    dlrover-hooks run --nproc-per-node 1:3 examples/elastic/lightning/train.py --lose-at 30

The survivors automatically leave `fit` and enter it again at the step where they were.
"""

import argparse
import os
import signal
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.integrations.lightning import ElasticCallback

CONTEXT, WIDTH, VOCABULARY = 64, 64, 128


class StandardLibrary(Dataset):
    def __init__(self, windows: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: windows * CONTEXT + 1]
        self.windows = torch.tensor(list(text)).clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class CharacterGPT(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def training_step(self, text: Tensor, _: int) -> Tensor:
        hidden = self.block(self.embed(text[:, :-1]) + self.place, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class LoseOne(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.at and trainer.global_rank == 1 and trainer.world_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def main(given: argparse.Namespace) -> None:
    seed_everything(1)
    told = "rank {0.rank} of {0.world_size} goes on at step {0.step}".format
    elastic = ElasticCallback(global_batch_size=48, on_recover=lambda news: print(told(news)))
    trainer = Trainer(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp", logger=False,
                      max_epochs=given.epochs, enable_checkpointing=False, enable_progress_bar=False,
                      callbacks=[elastic, LoseOne(given.lose_at)])  # fmt: skip
    trainer.fit(CharacterGPT(), DataLoader(StandardLibrary(given.windows), 8, shuffle=True, num_workers=2))
    if trainer.is_global_zero:
        print(f"ends at step {trainer.global_step} with {trainer.world_size} workers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=2400)
    parser.add_argument("--lose-at", type=int, default=0, help="rank 1 kills itself after this step")
    main(parser.parse_args())
