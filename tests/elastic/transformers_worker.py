"""A worker of the tests of in-process recovery under Transformers: what `worker` is for a plain loop."""

from __future__ import annotations

import logging
import os
import select
import uuid
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import transformers.trainer  # noqa: F401 - before the fork
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dlrover_hooks import elastic_run
from dlrover_hooks.integrations.transformers import ElasticTraining, _private_api as private, elastic_trainer
from dlrover_hooks.launcher.warm import worker_bootstrap
from tests.elastic.worker import Numbers, Worker, state


class Rows(Dataset[dict[str, Any]]):
    """As Trainer wants them."""

    def __len__(self) -> int:
        return len(Numbers())

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y, number = Numbers()[index]
        return {"x": x, "y": y, "number": number}


class Net(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x).squeeze(1) - y).square().mean()}


class Told(Trainer):
    """Tells the worker what it does, and makes its trouble."""

    worker: TransformersWorker
    elastic: ElasticTraining
    at = 0

    def _run_epoch(self, *, epoch: int, **given: Any) -> None:
        self.at = epoch
        super()._run_epoch(epoch=epoch, **given)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        worker, step = self.worker, self.state.global_step
        worker.reach("fetched", step)
        ids, draw = [] if self.elastic.repeats else inputs["number"].tolist(), torch.rand(1).item()
        loss = super().training_step(model, inputs, *args, **kwargs)
        worker.note("micro", step=step, epoch=self.at, ids=ids, world=self.args.world_size,
                    draw=draw)  # fmt: skip
        worker.reach("backward", step)
        return loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.worker.reach("validating", self.state.global_step)
        self.worker.note("validated", step=self.state.global_step, ids=inputs["number"].tolist())
        return super().prediction_step(model, inputs, *args, **kwargs)


class Tells(TrainerCallback):
    def __init__(self, worker: TransformersWorker) -> None:
        self.worker = worker

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.worker.found()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        worker = self.worker
        worker.note("step", step=state.global_step, world=args.world_size)
        worker.reach("stepped", state.global_step)
        select.select([], [], [], worker.pace_s)


class TransformersWorker(Worker):
    """`outer`: True puts `elastic_run` around a function that makes the Trainer; else `elastic_trainer` does it."""

    def __init__(self, name: str, folder: str, trouble: dict[str, Any], **settings: Any) -> None:
        self.outer, self.output = settings.pop("outer", False), folder
        self.recover = settings.pop("recover", "process")
        self.evaluates = settings.pop("evaluates", "no")
        super().__init__(name, folder, trouble, **settings)
        self.trainer: Told

    def train(self) -> None:
        if self.outer:
            return elastic_run(self.fit, on_recover=lambda news: self.told("recover", news))()
        self.fit()

    def fit(self) -> None:
        torch.manual_seed(1)
        args = TrainingArguments(
            self.output, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
            num_train_epochs=self.epochs, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=0.02, lr_scheduler_type="cosine", remove_unused_columns=False, seed=1,
            eval_strategy=self.evaluates, eval_steps=4,
        )  # fmt: skip
        trainer = Told(Net(self.parts()[0]), args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Tells(self)])
        trainer.remove_callback(PrinterCallback)
        trainer.worker = self
        self.trainer = elastic_trainer(
            trainer,
            recover=self.recover,
            on_recover=lambda news: self.told("recover", news),
            on_resize=lambda news: self.told("resize", news),
            **self.settings,
        )
        if self.recover == "restart":  # the process group is not made again
            self.begin()
        self.trainer.train()
        net = cast(Net, trainer.model).net
        self.note("trained", step=trainer.state.global_step, world=args.world_size, rank=args.process_index,
                  state=state(net, cast(Any, trainer.optimizer).optimizer), losses=self.losses())  # fmt: skip

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.trainer.state.log_history if "loss" in row]

    def found(self) -> None:
        """All is restored."""
        trainer = self.trainer
        self.model = weakref.ref(cast(Any, trainer.model_wrapped))
        loop = trainer.elastic.loop
        assert loop is not None
        (loader,) = loop._loaders
        cursor, step = loader.sampler.cursor, trainer.state.global_step
        self.note("restored", step=step, world=trainer.args.world_size, cursor=cursor,
                  state=state(cast(Net, trainer.model).net, cast(Any, trainer.optimizer).optimizer))  # fmt: skip
        self.reach("restored", 0)


def begun(call: Callable[[], None]) -> None:
    """At the start of each round: before the session joins."""
    make = private.group_again

    def group_again(timeout: timedelta) -> None:
        call()
        make(timeout)

    private.group_again = group_again


def main(name: str, folder: str, env: dict[str, str], trouble: dict[str, Any], options: dict[str, Any],
         settings: dict[str, Any]) -> int:  # fmt: skip
    told = {"DLROVER_HOOKS_INCARNATION": uuid.uuid4().hex, "DLROVER_HOOKS_JOIN": "1", "TORCHELASTIC_RUN_ID": "crew"}
    os.environ.update(told | env)
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)d {name} %(name)s: %(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worker_bootstrap.take_place()  # as the launcher has it done before the script runs: arguments are made for a world
    worker = TransformersWorker(name, folder, trouble, **settings)
    begun(worker.begin)
    try:
        worker.train()
    except SystemExit as end:
        worker.note("exit", code=end.code)
        raise
    except Exception as error:
        worker.note("failed", error=type(error).__name__, text=str(error))
        raise
    worker.note("end")
    return 0
