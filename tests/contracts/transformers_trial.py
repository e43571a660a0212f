"""The contract's trial under `elastic_trainer`."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dlrover_hooks.integrations.transformers import elastic_trainer
from tests.contracts.trial import EVALUATED, Crash, Given, Numbers, Report, Setup, keywords, loss_of

logging.getLogger("transformers").setLevel(logging.ERROR)


class Rows(Dataset[dict[str, Any]]):
    """As Trainer wants them."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, number = self.rows[index]
        return {"x": x, "ids": number}


class Model(nn.Module):
    """Its loss is the mean over the samples of a micro-batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, x, ids), "ids": ids}


class Noting(Trainer):
    """Reports what it trains on."""

    report: Report
    crash: int | None
    rows: list[int]
    at = 0

    def _run_epoch(self, *, epoch: int, **given: Any) -> None:
        self.at = epoch
        super()._run_epoch(epoch=epoch, **given)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == self.crash:
            raise Crash
        elastic: Any = getattr(self, "elastic", None)
        if elastic is None or not elastic.repeats:
            self.report.note(self.at, self.state.global_step, "train", inputs["ids"])
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.rows += inputs["ids"].tolist()
        return super().prediction_step(model, inputs, *args, **kwargs)


class Notes(TrainerCallback):
    """Leaves epochs, and reports evaluations."""

    def __init__(self, given: Given, report: Report) -> None:
        self.given, self.report = given, report
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = self.given.leave > 0 and state.global_step % self.given.leave == 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        elastic = getattr(self.trainer, "elastic", None)
        restored = elastic.restored if elastic is not None else None
        self.report.restored = restored.generation.step if restored is not None else None
        self.report.active = elastic is not None

    def on_evaluate(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        self.report.evaluated.append(self.trainer.rows)
        self.report.evaluated_at.append(state.global_step)
        self.report.untouched &= isinstance(eval_dataloader, DataLoader)
        self.trainer.rows = []


def train(given: Given, crash: int | None) -> Report:
    """See `Trial`; `options` go to the arguments."""
    made, report = Setup(given), Report()
    notes = Notes(given, report)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
            eval_strategy="epoch", num_train_epochs=given.epochs, per_device_train_batch_size=given.batch,
            per_device_eval_batch_size=given.batch, gradient_accumulation_steps=given.accumulate, max_grad_norm=0.0,
            remove_unused_columns=False, **given.options,
        )  # fmt: skip
        trainer = Noting(
            Model(made.net), args, train_dataset=Rows(Numbers(given.samples, given.noise)),
            eval_dataset=Rows(Numbers(EVALUATED, False)), callbacks=[notes],
            optimizers=cast(Any, (made.optimizer, made.schedule)),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.report, trainer.crash, trainer.rows = report, crash, []
        notes.trainer = trainer = elastic_trainer(trainer, **keywords(given))
        report.crashed = True
        with contextlib.suppress(Crash):
            trainer.train()
            report.crashed = False
    report.step = trainer.state.global_step
    report.end(made.net, made.optimizer, made.schedule)
    return report
