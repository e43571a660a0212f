"""Run by test_lightning_restore.py, once per rank: restore from every step of a short Lightning run and compare.

For each accumulation an undisturbed run is the reference. Then for every place to crash a run is broken off there, a
new Trainer with a new model resumes from memory, and the whole is compared: weights, optimizer, schedulers, losses, the
order of callback hooks, validation. Prints one JSON line per comparison; the test asserts on them.
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
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.integrations.lightning import ElasticCallback
from tests.pace import pace

pace()
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SAMPLES, EPOCHS, BATCH = 23, 2, 2
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Crash(Exception):
    pass


class Noisy(Dataset):
    """Draws from the global random state in `__getitem__`, as many augmentations do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(5, generator=generator) + 0.01 * torch.randn(5), torch.tensor(float(index % 3))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1))
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        # a batch of one sample has no variance: batch norm would refuse it
        x = x.repeat(2, 1) if len(x) == 1 else x
        loss = (self.net(x).squeeze(1) - y.mean()).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = (self.net(batch[0]).squeeze(1) - batch[1]).square().mean()
        if not self.trainer.sanity_checking:
            self.validated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(Callback):
    """Every hook with the step it fired at; `at[step]` is where the record stood at the step boundary after `step`."""

    def __init__(self, crash: tuple[str, int] | None = None) -> None:
        self.events: list[tuple] = []
        self.at: dict[int, int] = {}
        self.crash = crash

    def note(self, hook: str, trainer: Trainer, *more) -> None:
        if trainer.sanity_checking:
            return
        if self.crash == (hook, trainer.global_step):
            raise Crash
        self.events.append((hook, trainer.current_epoch, trainer.global_step, *more))

    def on_train_epoch_start(self, trainer, module):
        self.note("train_epoch_start", trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.at.setdefault(trainer.global_step, len(self.events))
        self.note("batch_start", trainer, batch_idx)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.note(
            "batch_end",
            trainer,
            batch_idx,
            len(batch[0]),
            module.losses[-1],
            trainer.fit_loop.epoch_loop._batches_that_stepped,
        )

    def on_validation_start(self, trainer, module):
        self.note("validation_start", trainer)

    def on_validation_end(self, trainer, module):
        self.note("validation_end", trainer, *module.validated[-1:])

    def on_train_epoch_end(self, trainer, module):
        self.note("train_epoch_end", trainer, round(float(trainer.optimizers[0].param_groups[0]["lr"]), 12))


def fit(job: str, accumulate: int, crash: tuple[str, int] | None = None, **more: Any):
    """One fit in a fresh Trainer and model; returns (model, trainer, recorder, restored generation's step or None)."""
    seed_everything(3, verbose=False)
    recorder, elastic = Recorder(crash), ElasticCallback(job=job, save_every=1)
    seen: dict[str, int | None] = {}

    class Look(Callback):
        def on_train_start(self, trainer, module):
            seen["restored"] = elastic.restored.generation.step if elastic.restored else None

    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto", logger=False,
        accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
        use_distributed_sampler=True, enable_model_summary=False, callbacks=[elastic, Look(), recorder],
        log_every_n_steps=1, **more,
    )  # fmt: skip
    model = Net()
    train = DataLoader(Noisy(), batch_size=BATCH, shuffle=True)
    val = DataLoader(Noisy(), batch_size=8)
    with contextlib.suppress(Crash):
        trainer.fit(model, train, val)
    return model, trainer, recorder, seen.get("restored")


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def places(reference: Recorder, steps: int) -> list[tuple[str, int]]:
    """Every step boundary, and three places inside the end of an epoch."""
    quiet = [("batch_start", step) for step in sorted(reference.at) if step > 0]
    first_end = next(event[2] for event in reference.events if event[0] == "train_epoch_end")
    return [*quiet, ("validation_start", first_end), ("validation_end", first_end), ("train_epoch_end", steps)]


def main() -> None:
    prefix = sys.argv[1]
    variants: list[dict[str, Any]] = [{}, {"val_check_interval": 2}]
    for accumulate in map(int, sys.argv[2].split(",")):
        for more in variants if accumulate == 1 and WORLD == 1 else variants[:1]:
            model, trainer, reference, _ = fit(f"{prefix}-{WORLD}-{accumulate}-calm{len(more)}", accumulate, **more)
            for crash in places(reference, trainer.global_step):
                job = f"{prefix}-{WORLD}-{accumulate}-{len(more)}-{crash[0]}-{crash[1]}"
                _, _, before, _ = fit(job, accumulate, crash, **more)
                again, trainer2, after, restored = fit(job, accumulate, **more)
                lived = before.events[: before.at.get(restored, 0) if restored is not None else 0] + after.events
                pairs = zip(lived, reference.events, strict=False)  # the lengths are compared too
                difference = next((pair for pair in pairs if pair[0] != pair[1]), None)
                schedules = [each.lr_scheduler_configs[0].scheduler.state_dict() for each in (trainer, trainer2)]
                print(json.dumps({
                    "rank": trainer.global_rank, "accumulate": accumulate, "crash": crash, "restored": restored,
                    "weights": same(dict(model.state_dict()), dict(again.state_dict())),
                    "optimizer": same(trainer.optimizers[0].state_dict(), trainer2.optimizers[0].state_dict()),
                    "schedule": schedules[0] == schedules[1],
                    "events": lived == reference.events, "difference": difference,
                    "lengths": [len(lived), len(reference.events)],
                }), flush=True)  # fmt: skip
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
