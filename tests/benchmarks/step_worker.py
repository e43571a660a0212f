"""A worker of `make bench-step`: one training loop, in the way that its first argument names.

It trains in turns: the bench says how many steps, the worker makes them and answers with what they took. Between turns
it waits inside the loop's body, so that workers of all ways run in turn, each with all of its life behind it.
"""

from __future__ import annotations

import cProfile
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dlrover_hooks.checkpoint.save.schedule import StepPace

WARM_UP = 20
"""Steps at the beginning of a turn that are not timed: caches are those of another process."""
EPOCHS = 1_000_000


class Turns:
    """The line to the bench. `pace`: sets the session's clock of steps back, as a pause between turns is no step."""

    def __init__(self, path: str, arm: str) -> None:
        self.pace: Callable[[], object] = lambda: None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw")
        self._left, self._steps, self._began = 0, 0, (0.0, 0.0)
        folder = os.environ.get("BENCH_STEP_PROFILE")
        self._profile = cProfile.Profile() if folder else None
        self._profile_to = Path(folder or "") / f"{arm}-{os.environ.get('RANK', '0')}.prof"
        self._say({"arm": arm, "rank": int(os.environ.get("RANK", "0"))})

    def more(self) -> bool:
        """At the top of the loop's body. False: training ends here."""
        if self._left == self._steps:
            self._begin()
        self._left -= 1
        return self._left >= 0 or self._next()

    def _begin(self) -> None:
        if self._profile is not None:
            self._profile.enable()
        self._began = time.thread_time(), time.perf_counter()

    def _next(self) -> bool:
        cpu, wall = time.thread_time(), time.perf_counter()
        if self._profile is not None:
            self._profile.disable()
        if self._steps:
            self._say({"cpu_s": (cpu - self._began[0]) / self._steps, "wall_s": (wall - self._began[1]) / self._steps})
        steps = json.loads(self._lines.readline())["steps"]
        self.pace()
        self._steps, self._left = steps, steps + WARM_UP
        if not steps and self._profile is not None:
            self._profile.dump_stats(self._profile_to)
        return steps > 0

    def _say(self, what: dict[str, Any]) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()


def data() -> TensorDataset:
    return TensorDataset(torch.randn(20_000, 64), torch.randn(20_000, 1))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.99)


def plain(turns: Turns, *, alone: bool) -> None:
    """The loop without hooks."""
    model, found = net(), data()
    if not alone:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = schedule(optimizer)
    sampler = None if alone else DistributedSampler(found)
    loader = DataLoader(found, batch_size=16, sampler=sampler, shuffle=alone)
    for epoch in range(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        if not _epoch(turns, loader, model, optimizer, scheduler):
            break
    if not alone:
        torch.distributed.destroy_process_group()


def hooks(turns: Turns, *, alone: bool) -> None:
    """The same with `elastic_loader` and `AsyncCheckpointer`."""
    from dlrover_hooks import AsyncCheckpointer, elastic_loader

    model = net()
    if not alone:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = schedule(optimizer)
    loader = elastic_loader(DataLoader(data(), batch_size=16, shuffle=True), optimizer=optimizer)
    with AsyncCheckpointer("saved", model=model, optimizer=optimizer, loader=loader, extra=[scheduler]) as checkpoints:
        turns.pace = lambda: _forget_pace(checkpoints.session)
        for _ in loader.epochs(EPOCHS):
            if not _epoch(turns, loader, model, optimizer, scheduler):
                break
        checkpoints.wait_copied()
    if not alone:
        torch.distributed.destroy_process_group()


def elastic(turns: Turns) -> None:
    """The same under `elastic_run`."""
    from dlrover_hooks import elastic_run

    elastic_run(lambda: hooks(turns, alone=False))()


def _epoch(turns: Turns, loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> bool:
    for inputs, targets in loader:
        if not turns.more():
            return False
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return True


def _forget_pace(session: Any) -> None:
    session._pace = StepPace()


def lightning(turns: Turns, *, hooked: bool) -> None:
    """A `Trainer`, with an `ElasticCallback` or without."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"},
            }

    class InTurn(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> int | None:
            if turns.more():
                return None
            trainer.should_stop = True
            return -1

    callbacks: list[Callback] = [InTurn()]
    if hooked:
        from dlrover_hooks.integrations.lightning import ElasticCallback

        ours = ElasticCallback("saved")
        turns.pace = lambda: _forget_pace(ours.session)
        callbacks.append(ours)
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=EPOCHS, logger=False,
        callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(data(), batch_size=16, shuffle=True))
    if torch.distributed.is_initialized():  # without it the process may abort in a thread of gloo's at its exit
        torch.distributed.destroy_process_group()


ARMS: dict[str, Callable[[Turns], None]] = {
    "plain": lambda turns: plain(turns, alone=False),
    "hooks": lambda turns: hooks(turns, alone=False),
    "elastic": elastic,
    "lightning": lambda turns: lightning(turns, hooked=False),
    "lightning_hooks": lambda turns: lightning(turns, hooked=True),
    "plain_alone": lambda turns: plain(turns, alone=True),
    "hooks_alone": lambda turns: hooks(turns, alone=True),
}


def main(arm: str, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ARMS[arm](Turns(path, arm))


if __name__ == "__main__":
    main(*sys.argv[1:])
