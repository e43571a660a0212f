"""A plain PyTorch loop under `AsyncCheckpointer`, for test_torch.py: imported by it, or one worker process.

Usage: torch_cases.py JSON; the keys are the arguments of `train`. Each step appends a line to `ids`, if that is given.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.torch import AsyncCheckpointer

SAMPLES = 22


class Crash(Exception):
    pass


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Draws from the global random state, as many augmentations do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / SAMPLES) + 0.01 * torch.randn(4), index


def crash(at: tuple[str, int] | None, place: str, step: int, kill: bool) -> None:
    """Places: before the backward, after the optimizer's step, after the scheduler's."""
    if at is not None and (place, step) == tuple(at):
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Crash


def train(
    job: str,
    *,
    epochs: int = 2,
    at: tuple[str, int] | None = None,
    kill: bool = False,
    crash_rank: int = 0,
    ids: str | None = None,
    seed: int = 7,
    **shared: Any,
) -> dict[str, Any]:
    """Parameters, optimizer and scheduler after `epochs` in all, and the (epoch, step, id) this process saw."""
    torch.manual_seed(seed + int(os.environ.get("RANK", "0")))
    net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    loader = elastic_loader(DataLoader(Noisy(), batch_size=2, shuffle=True), optimizer=optimizer, accumulation="manual")
    seen: list[tuple[int, int, int]] = []
    mine = int(os.environ.get("RANK", "0")) == crash_rank
    shared.setdefault("save_every", 1)
    checkpoints = AsyncCheckpointer(
        model=model, optimizer=optimizer, loader=loader, extra=[schedule], job=job, **shared
    )
    first = checkpoints.step
    with checkpoints:
        for epoch in loader.epochs(epochs):
            for x, index in loader:
                step = checkpoints.step
                crash(at if mine else None, "forward", step, kill)
                counted = index.tolist() if loader.weight > 0 else []
                seen += [(epoch, step, one) for one in counted]
                _note(ids, [(epoch, step, one) for one in counted])
                loss = (model(x).squeeze(1) - index / SAMPLES).square().mean()
                (loss / loader.sampler.plan.micro_batches).backward()
                if loader.step_ends:
                    optimizer.step()
                    crash(at if mine else None, "stepped", step, kill)
                    schedule.step()
                    optimizer.zero_grad()
                    crash(at if mine else None, "scheduled", step, kill)
    restored = checkpoints.restored
    return {
        "seen": seen, "first": first, "step": checkpoints.step, "lr": schedule.get_last_lr(),
        "weights": [tensor.tolist() for tensor in net.state_dict().values()],
        "moments": [tensor.tolist() for state in optimizer.state.values() for tensor in state.values()],
        "rng": torch.get_rng_state().sum().item(), "source": restored.source.value if restored else None,
    }  # fmt: skip


def _note(path: str | None, lines: list[tuple[int, int, int]]) -> None:
    if path is not None:
        with Path(f"{path}.{os.getpid()}").open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)


def main() -> None:
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    found = train(**json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
