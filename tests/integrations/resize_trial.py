"""Run by test_lightning_resize.py, once per rank: part of a Lightning run, broken off at a step if one is given.

Prints one JSON line per micro-batch, with the sample ids it held, one with the restored step, and one per validation.
"""

import contextlib
import json
import logging
import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from dlrover_hooks.integrations.lightning import ElasticCallback
from tests.pace import pace

pace()
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SAMPLES, EPOCHS, BATCH = 43, 3, 2


class Crash(Exception):
    pass


def numbers(count: int) -> Any:
    return range(count)  # a map-style dataset to torch, though not to its types


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        say(epoch=self.current_epoch, step=self.global_step, ids=batch.tolist(), ghost=elastic.ghost)
        return self.layer(batch.float()[:, None]).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Look(Callback):
    def on_train_start(self, trainer, module):
        say(restored=elastic.restored.generation.step if elastic.restored else 0)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == crash:
            raise Crash

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            say(validated=trainer.current_epoch, step=trainer.global_step)


class Elastic(ElasticCallback):
    @property
    def ghost(self) -> bool:
        loader = self._loaders["train"]
        return loader.sampler.step.ghost or getattr(loader, "ghost", False)


if __name__ == "__main__":
    job, global_batch, crash = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    world = int(os.environ.get("WORLD_SIZE", 1))
    seed_everything(3, verbose=False)
    elastic = Elastic(job=job, save_every=1, global_batch_size=global_batch)
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[elastic, Look()],
    )  # fmt: skip
    with contextlib.suppress(Crash):
        trainer.fit(Net(), DataLoader(numbers(SAMPLES), BATCH, shuffle=True), DataLoader(numbers(4), 4))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
