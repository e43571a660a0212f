"""The contract's trial under `ElasticCallback`."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.pytorch.even_batches import leader
from tests.contracts.trial import Crash, Given, Report, Setup, joint_loss, keywords

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    def __init__(self, given: Given, made: Setup, report: Report, crash: int | None, frequency: int) -> None:
        super().__init__()
        self.given = given
        self.frequency = frequency
        self.made, self.report, self.crash, self.net = [made], report, crash, made.net
        self.ids: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash:
            raise Crash
        parts = [(name, batch[name]) for name in ("train", "second") if batch.get(name) is not None]
        for name, (_, ids) in () if is_ghost(self.trainer) else parts:
            self.report.note(self.current_epoch, self.global_step, name, ids)
        if "own" in batch:
            self.report.own += batch["own"].tolist()
        loss = joint_loss(self.given, self.net, [one for _, one in parts])
        size = len(parts[0][1][1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=size)  # a collective per batch
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ids += batch[1].tolist()

    def on_validation_epoch_end(self) -> None:
        self.report.evaluated.append(self.ids)
        self.report.evaluated_at.append(self.global_step)
        self.ids = []

    def configure_optimizers(self) -> Any:
        made = self.made[0]
        schedule = {"scheduler": made.schedule, "interval": "step", "frequency": self.frequency}
        return {"optimizer": made.optimizer, "lr_scheduler": schedule}


def is_ghost(trainer: Trainer) -> bool:
    """Has the leading loader's batch no weight on this rank?"""
    loaders: Any = trainer.fit_loop._combined_loader.flattened  # pyright: ignore[reportOptionalMemberAccess]
    lead = leader([one for one in loaders if hasattr(one, "weight")])
    return lead is not None and (getattr(lead, "ghost", False) or lead.weight == 0)


class Look(Callback):
    """What the run began with, and which objects it got."""

    def __init__(self, elastic: ElasticCallback, made: Setup, report: Report) -> None:
        self.elastic, self.made, self.report = elastic, made, report

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        restored = self.elastic.restored
        self.report.restored = restored.generation.step if restored is not None else None
        self.report.active = self.elastic.session is not None
        loaders: Any = trainer.fit_loop._combined_loader.flattened  # pyright: ignore[reportOptionalMemberAccess]
        evaluation = type(trainer.val_dataloaders) is DataLoader
        self.report.untouched = evaluation and (self.made.own is None or loaders[-1] is self.made.own)


def train(given: Given, crash: int | None) -> Report:
    """See `Trial`; `options` go to the Trainer, except the `frequency` of schedules and the `mode` of loaders."""
    options: dict[str, Any] = {"limit_train_batches": given.leave * given.accumulate or 1.0} | given.options
    frequency, mode = options.pop("frequency", 1), options.pop("mode", "min_size")
    os.environ["PL_GLOBAL_SEED"] = "0"
    made, report = Setup(given), Report()
    elastic = ElasticCallback(**keywords(given))
    names = {"train": made.train, "second": made.second, "own": made.own}
    feeds = CombinedLoader({name: one for name, one in names.items() if one is not None}, mode)
    trainer = Trainer(
        max_epochs=given.epochs, accelerator="cpu", devices=given.world, logger=False, enable_checkpointing=False,
        strategy="ddp" if given.world > 1 else "auto", accumulate_grad_batches=given.accumulate,
        num_sanity_val_steps=0, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[elastic, Look(elastic, made, report)],
        **options,
    )  # fmt: skip
    module = Module(given, made, report, crash, frequency)
    report.crashed = True
    with contextlib.suppress(Crash):
        trainer.fit(module, feeds, made.evaluation)
        report.crashed = False
    report.step = trainer.global_step
    report.end(made.net, trainer.optimizers[0], made.schedule)
    return report
