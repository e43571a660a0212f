"""A small GPT that learns to write Python by reading Python's own standard library, character by character."""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.integrations.lightning import ElasticCallback

CONTEXT, WIDTH, VOCABULARY = 64, 96, 128


class StandardLibrary(Dataset):
    """Windows of `CONTEXT` characters of the library's source; `part` is a slice of the files in order of name."""

    def __init__(self, part: slice, windows: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[part])[: windows * CONTEXT + 1]
        self.windows = torch.tensor(list(text)).clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows[index][:-1], self.windows[index][1:]


class CharacterGPT(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.blocks(self.embed(batch[0]) + self.place, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=2000, help="training windows of 64 characters")
    given = parser.parse_args()
    seed_everything(1)
    workers = int(os.environ.get("WORLD_SIZE", 1))
    train = DataLoader(StandardLibrary(slice(0, 60), given.windows), 32 // workers, shuffle=True)
    val = DataLoader(StandardLibrary(slice(60, None), given.windows // 10), 32)
    trainer = Trainer(
        callbacks=[ElasticCallback(save_to="saved")],
        max_epochs=given.epochs,
        accelerator="cpu",
        devices=workers,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(CharacterGPT(), train, val)


if __name__ == "__main__":
    main()
