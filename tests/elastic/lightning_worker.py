"""A worker of the tests of in-process recovery under Lightning: what `worker` is for a plain loop."""

from __future__ import annotations

import logging
import os
import select
import uuid
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from dlrover_hooks import elastic_run
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.launcher.warm import worker_bootstrap
from tests.elastic.worker import Numbers, Worker, state


class Net(LightningModule):
    """Tells the worker what it does, and makes its trouble."""

    def __init__(self, worker: LightningWorker) -> None:
        super().__init__()
        self.worker = worker
        self.net = worker.parts()[0]
        self.mean = MeanMetric()

    def world(self) -> int:
        return self.trainer.world_size

    def on_train_start(self) -> None:
        worker, optimizer = self.worker, self.trainer.optimizers[0]
        worker.model = weakref.ref(self.trainer.strategy.model)  # pyright: ignore[reportArgumentType]
        worker.modes.append(all(one.training for one in self.modules()))
        loader = worker.callback._loaders["train"]
        restored = worker.callback.restored
        worker.note("restored", step=self.global_step, world=self.world(), state=state(self.net, optimizer),
                    cursor=loader.sampler.cursor, cut=restored and restored.data["train"]["cursor"])  # fmt: skip
        worker.reach("restored", 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y, index = batch
        worker = self.worker
        worker.reach("fetched", self.global_step)
        loss = (self(x) - y).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss)
        worker.note("micro", step=self.global_step, epoch=self.current_epoch, ids=index.tolist(), world=self.world(),
                    draw=torch.rand(1).item())  # fmt: skip
        return loss

    def on_after_backward(self) -> None:
        self.worker.reach("backward", self.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step > self.worker.step:
            self.worker.note("step", step=self.global_step, world=self.world())
            self.worker.reach("stepped", self.global_step)
            if self.worker.talks:
                self.trainer.strategy.barrier()
            select.select([], [], [], self.worker.pace_s)
        self.worker.step = self.global_step

    def validation_step(self, batch: Any, number: int) -> None:
        if not number:
            self.worker.reach("validating", self.global_step)
        self.log("wrong", (self(batch[0]) - batch[1]).square().mean(), sync_dist=not self.worker.apart)
        self.worker.note("validated", step=self.global_step, ids=batch[2].tolist())

    def on_train_epoch_end(self) -> None:
        self.mean.reset()

    def on_train_end(self) -> None:
        self.worker.note("trained", step=self.global_step, state=state(self.net, self.trainer.optimizers[0]),
                         world=self.world(), rank=self.trainer.global_rank,
                         counted=self.worker.counts.counted)  # fmt: skip

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        if self.worker.plateau:  # nothing is good enough
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.99)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "wrong"}}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counts(Callback):
    """Counts micro-batches, and so changes within each step: its state is that of a step that is over."""

    counted = 0

    def on_before_backward(self, *_: Any) -> None:
        self.counted += 1

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counted = state_dict["counted"]


class Adds(Counts):
    """The same by hooks that are called for each checkpoint."""

    def __init__(self, worker: LightningWorker) -> None:
        self.worker = worker

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted
        self.worker.note("asked", step=trainer.global_step, counted=self.counted)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]


class LightningWorker(Worker):
    """`outer`: True puts `elastic_run` around a function that makes the Trainer; else the callback does it alone."""

    def __init__(self, name: str, folder: str, trouble: dict[str, Any], **settings: Any) -> None:
        self.outer, self.files = settings.pop("outer", False), settings.pop("files", "")
        self.rows = settings.pop("rows", "")
        self.talks, self.apart = settings.pop("talks", False), settings.pop("apart", False)
        self.ckpt, self.plateau = settings.pop("ckpt", None), settings.pop("plateau", False)
        self.validate, self.adds = settings.pop("validate", 1.0), settings.pop("adds", False)
        super().__init__(name, folder, trouble, **settings)
        self.modes = list[bool]()
        self.callback: ElasticCallback
        self.counts: Counts

    def train(self) -> None:
        if self.outer:
            return elastic_run(self.fit, on_recover=lambda news: self.told("recover", news))()
        self.fit()

    def fit(self) -> None:
        seed_everything(1, verbose=False)
        self.callback = ElasticCallback(
            on_recover=lambda news: self.told("recover", news),
            on_resize=lambda news: self.told("resize", news),
            **self.settings,
        )
        self.counts = Adds(self) if self.adds else Counts()
        callbacks: list[Callback] = [self.callback, self.counts]
        if self.files:
            callbacks.append(ModelCheckpoint(self.files, save_top_k=-1, every_n_train_steps=4))
        options: dict[str, Any] = {
            "accumulate_grad_batches": 2,
            "log_every_n_steps": 1,
            "logger": CSVLogger(self.rows, "", flush_logs_every_n_steps=1) if self.rows else False,
            "enable_checkpointing": bool(self.files),
        }
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
                    "val_check_interval": self.validate}  # fmt: skip
        trainer = Trainer(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp",
                          max_epochs=self.epochs, callbacks=callbacks, **options)  # fmt: skip
        net = Net(self)
        begun(trainer, self.begin)
        loader = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=self.workers)
        trainer.fit(net, loader, DataLoader(Numbers(), batch_size=8), ckpt_path=self.ckpt, weights_only=False)
        self.note("modes", modes=self.modes)


def begun(trainer: Trainer, call: Callable[[], None]) -> None:
    """At the start of each life: before the process group is made."""
    enter = trainer.strategy.setup_environment

    def setup_environment() -> None:
        call()
        enter()

    trainer.strategy.setup_environment = setup_environment


def main(name: str, folder: str, env: dict[str, str], trouble: dict[str, Any], options: dict[str, Any],
         settings: dict[str, Any]) -> int:  # fmt: skip
    told = {"DLROVER_HOOKS_INCARNATION": uuid.uuid4().hex, "DLROVER_HOOKS_JOIN": "1", "TORCHELASTIC_RUN_ID": "crew"}
    os.environ.update(told | env)
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)d {name} %(name)s: %(message)s")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worker_bootstrap.take_place()  # as the launcher has it done before the script runs: a Trainer is made for a world
    worker = LightningWorker(name, folder, trouble, **settings)
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
