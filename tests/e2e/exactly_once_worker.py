"""One rank of a run whose model counts, in its weights, how often each sample was trained: the checkpoint cannot lie.

    python -m tests.e2e.exactly_once_worker LOOP KILL_RANK KILL_STEP

LOOP: `leased` (a plain loop over a ShardDataset), `lightning` or `accelerate` (both with the sampler, under DDP). Rank
KILL_RANK kills itself in KILL_STEP, before the optimizer's step. Prints one JSON line when it has resumed, one for each
step, and at the end the weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

SAMPLES, EPOCHS, BATCH = 210, 2, 3
G = 4 * BATCH
"""Not a divisor of SAMPLES: epochs end in a short step."""


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def numbers() -> Any:
    return range(SAMPLES)  # a map-style dataset to torch, though not to its types


def shoot(step: int) -> None:
    """One line for each step; the chosen rank ends here at the chosen one."""
    say(step=step)
    if (int(os.environ["RANK"]), step) == (int(sys.argv[2]), int(sys.argv[3])):
        os.kill(os.getpid(), signal.SIGKILL)


def report(restored: Any, visits: torch.Tensor | None = None) -> None:
    if visits is None:
        say(restored=restored.generation.step if restored is not None else 0)
    else:
        say(visits=visits.tolist())


class Visits(nn.Module):
    """The loss falls with each visit of a sample: its weight grows by the learning rate over the step's size."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -self.visits[ids].mean()


def rate(step: int) -> float:
    """The learning rate with which each visit counts one: the size of the step."""
    tail = SAMPLES % G
    return float(tail if (step + 1) % -(-SAMPLES // G) == 0 else G)


def leased() -> None:
    from dlrover_hooks import AsyncCheckpointer, ShardDataset, elastic_loader

    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    model = Visits()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    lent = ShardDataset(numbers(), shard_size=11, epochs=EPOCHS)
    loader: Any = elastic_loader(DataLoader(lent, batch_size=BATCH, num_workers=1))
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, save_every=1) as saving:
        report(saving.restored)
        for _ in loader.epochs():
            for ids in loader:
                count = torch.zeros(SAMPLES, dtype=torch.float64)
                count[ids] = 1.0 if loader.weight else 0.0
                if dist.is_initialized():
                    dist.all_reduce(count)
                model.visits.grad = -count
                shoot(saving.step)
                optimizer.step()
        report(None, model.visits)


def accelerate() -> None:
    from accelerate import Accelerator

    from dlrover_hooks.integrations.accelerate import ElasticAccelerator

    accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), save_every=1, global_batch_size=G)
    model = Visits()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    wrapped, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(numbers(), BATCH, shuffle=True, num_workers=1)
    )
    report(accelerator.loop.restored)
    for _ in accelerator.epochs(EPOCHS):
        for ids in loader:
            accelerator.backward(wrapped(ids))
            if accelerator.sync_gradients:
                optimizer.param_groups[0]["lr"] = rate(accelerator.loop.step)
                shoot(accelerator.loop.step)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    report(None, model.visits)


def lightning() -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from dlrover_hooks.integrations.lightning import ElasticCallback

    class Counting(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Visits()

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(ids)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            optimizer.param_groups[0]["lr"] = rate(self.global_step)
            shoot(self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    class Resumed(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            report(elastic.restored)

    elastic, module, world = ElasticCallback(save_every=1, global_batch_size=G), Counting(), os.environ["WORLD_SIZE"]
    Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=int(world), strategy="ddp" if world != "1" else "auto",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[elastic, Resumed()],
    ).fit(module, DataLoader(numbers(), BATCH, shuffle=True, num_workers=1))  # fmt: skip
    report(None, module.model.visits)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    {"leased": leased, "lightning": lightning, "accelerate": accelerate}[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
