"""Gradient scaler, moving average, two optimizers and schedulers, broken off and resumed bit-equal.

Each through the public API of its adapter, with eager saves and with lazy ones. One batch in each epoch overflows: the
scaler leaves its steps out and changes its scale.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from tests.integrations.test_lightning_io import same
from tests.integrations.torch_cases import SAMPLES, Crash, Noisy

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OVERFLOWS = 9
"""The sample whose batch has infinite gradients."""
SCALE, GROWTH = 1024.0, 2
Train = Callable[..., dict[str, Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        loss = (self.head(self.body(x)).squeeze(1) - ids / SAMPLES).square().mean()
        return loss * torch.inf if OVERFLOWS in ids else loss

    def optimizers_of(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(self.body.parameters(), lr=0.05),
            torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9),
        ]


class Parts:
    """What a script makes. The scale grows at each second step that is whole."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.optimizers = self.net.optimizers_of()
        self.schedules = [torch.optim.lr_scheduler.StepLR(one, 3, 0.8) for one in self.optimizers]
        self.scaler = scaler()
        self.average: Any = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.loader = DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True)

    def state(self) -> dict[str, Any]:
        stateful = [self.net, *self.optimizers, *self.schedules, self.scaler, self.average]
        found = {"state": [one.state_dict() for one in stateful], "rng": torch.get_rng_state()}
        return found | {"scale": self.scaler.get_scale()}


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH)


def plain(job: str, *, crash: int | None = None, seed: int = 1, **shared: Any) -> dict[str, Any]:
    """`AsyncCheckpointer`, which counts the steps of one optimizer; everything else goes into `extra`."""
    made = Parts(seed)
    first, second = made.optimizers
    loader = elastic_loader(made.loader, optimizer=first)
    extra = [second, *made.schedules, made.scaler, made.average]
    checkpoints = AsyncCheckpointer(model=made.net, optimizer=first, loader=loader, extra=extra, job=job, **shared)
    with checkpoints:
        for _ in loader.epochs(2):
            for batch in loader:
                made.scaler.scale(made.net.loss(*batch)).backward()
                for one in made.optimizers:
                    made.scaler.step(one)
                made.scaler.update()
                if crash == checkpoints.step:
                    raise Crash
                for one in made.optimizers:
                    one.zero_grad()
                for one in made.schedules:
                    one.step()
                made.average.update_parameters(made.net)
    return made.state()


def accelerate(job: str, *, crash: int | None = None, seed: int = 1, **shared: Any) -> dict[str, Any]:
    """Two prepared optimizers, Accelerate's own scaler, the average registered."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    made, inner = Parts(seed), Accelerator(cpu=True)
    inner.scaler = made.scaler  # Accelerate makes one for fp16, which it wants a GPU for
    accelerator: Any = ElasticAccelerator(inner, job=job, **shared)
    net, first, second, loader, *schedules = accelerator.prepare(
        made.net, *made.optimizers, made.loader, *made.schedules
    )
    accelerator.register_for_checkpointing(made.average)
    try:
        for _ in accelerator.epochs(2):
            for batch in loader:
                accelerator.backward(net.loss(*batch))
                for one in (first, second):
                    one.step()
                if crash == accelerator.step:
                    raise Crash
                for one in (first, second):
                    one.zero_grad()
                for one in schedules:
                    one.step()
                made.average.update_parameters(made.net)
        accelerator.finish()
    finally:
        accelerator.close()
    return made.state()


class Validated(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net.head(self.net.body(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def test_weights_swapped_for_a_validation_inside_a_window_cost_no_save(
    job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy behind the step is waited for: averaged weights come in by `.data`, which versions do not tell."""
    fill, swapped = LazyWriter.fill, threading.Event()
    under_way: list[bool] = []

    def slow(self: LazyWriter, shot: Any, target: Any, places: Any, *, alone: bool = False) -> None:
        if alone:
            swapped.clear()
            under_way.append(swapped.wait(0.1))
        fill(self, shot, target, places, alone=alone)

    class Swapped(Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            swapped.set()

    monkeypatch.setattr(LazyWriter, "fill", slow)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    trainer = Trainer(
        callbacks=[Swapped(), EMAWeightAveraging(decay=0.9), ElasticCallback(job=job, save_every=1, snapshot="lazy")],
        accumulate_grad_batches=2, val_check_interval=1, num_sanity_val_steps=0, limit_val_batches=1,
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Validated(), loader, DataLoader(Noisy(), batch_size=4))
    assert under_way
    assert not any(under_way)
    assert "changed outside of an optimizer's step" not in caplog.text
    assert "eager from here on" not in caplog.text


class Module(LightningModule):
    """Two optimizers, so it optimizes by hand; the scaler is Lightning's precision plugin."""

    def __init__(self, crash: int | None) -> None:
        super().__init__()
        self.net, self.crash, self.automatic_optimization = Net(), crash, False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ours: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        self.manual_backward(self.net.loss(*batch))
        for one in ours:
            one.step()
        if self.crash == self.global_step:
            raise Crash
        for one in (*ours, *schedules):
            one.zero_grad() if hasattr(one, "zero_grad") else one.step()

    def configure_optimizers(self) -> Any:
        made = self.net.optimizers_of()
        return made, [torch.optim.lr_scheduler.StepLR(one, 3, 0.8) for one in made]


def lightning(job: str, *, crash: int | None = None, seed: int = 1, **shared: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)  # of the data, too: it must stay
    torch.manual_seed(seed)
    average: Any = EMAWeightAveraging(decay=0.9)
    found: dict[str, Any] = {}

    class Last(Callback):
        """Before the average becomes the model."""

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            names = ("state_dict", "current_model_state", "averaging_state", "optimizer_states", "lr_schedulers",
                     "MixedPrecision")  # fmt: skip
            found.update(copy.deepcopy({name: checkpoint[name] for name in names}))
            found.update(rng=torch.get_rng_state(), scale=checkpoint["MixedPrecision"]["scale"])

    trainer = Trainer(
        callbacks=[Last(), average, ElasticCallback(job=job, **shared)],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler())],
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(crash), DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True))
    return found


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize(("train", "crash"), [(plain, 6), (accelerate, 6), (lightning, 12)])
def test_scaler_average_schedules_and_two_optimizers_are_bit_equal(
    job: str, train: Train, crash: int, snapshot: str
) -> None:
    """Broken off behind the optimizers' steps, before scaler, schedules and average have followed."""
    shared: dict[str, Any] = {"save_every": 1, "snapshot": snapshot}
    calm = train(f"{job}-calm", **shared)
    assert calm["scale"] < SCALE * 2 ** (10 // GROWTH)  # a step overflowed
    with pytest.raises(Crash):
        train(job, crash=crash, **shared)
    assert same(train(job, seed=2, **shared), calm)
