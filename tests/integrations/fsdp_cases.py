"""One life of a rank under `AsyncCheckpointer`, its model sharded by FSDP2, under DDP, or plain, for test_fsdp.py.

Usage: fsdp_cases.py JSON; the keys are the arguments of `train`. Everything is float64, so that world sizes agree.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.pytorch.even_batches import EvenLoader

SAMPLES, BATCH = 24, 12


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(0, 1, 5, dtype=torch.float64) + index / SAMPLES
        return x, x.sum().sin().view(1).expand(3)


class Stop(Exception):
    pass


def build(kind: str, mesh_shape: list[int] | None = None) -> Any:
    """At W = 5 some ranks have nothing of the last layer; its bias and weight have 3 rows."""
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.register_buffer("mean", torch.arange(5.0, dtype=torch.float64))
    if kind == "fsdp":
        shard(model, mesh_shape)
    return DistributedDataParallel(model) if kind == "ddp" else model


def shard(model: Any, mesh_shape: list[int] | None = None) -> None:
    names = ("replicate", "shard")[-len(mesh_shape) :] if mesh_shape else None
    mesh = dist.init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names) if mesh_shape else None
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)


def average_of(kind: str) -> Any:
    """Sharded as the model is."""
    average: Any = AveragedModel(build("plain"), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if kind == "fsdp":
        shard(average.module)
    return average


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digests(checkpoints: AsyncCheckpointer) -> dict[str, str]:
    """Of each tensor of the state, gathered. A collective where the model is sharded."""
    state = checkpoints._whole.save()
    tensors = {f"model.{name}": value for name, value in state["model"].items()}
    optimizers = [state["optimizer"], *(one.state_dict() for one in checkpoints._extra.parts[:1])]
    for name, moments in (item for one in optimizers for item in one["state"].items()):
        tensors |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    for one in checkpoints._extra.parts[1:]:
        tensors |= {f"average.{name}": value for name, value in one.state_dict().items()}
    return {name: digest(whole(tensor)) for name, tensor in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def train(
    job: str,
    kind: str,
    upto: int,
    *,
    finish: bool = False,
    mesh: list[int] | None = None,
    beside: bool = False,
    **shared: Any,
) -> dict[str, Any]:
    """Up to step `upto`, then stop there, or finish. Digests of the state by step, and the last weights.

    `beside`: the last layer has an optimizer of its own, and the model a moving average.
    """
    model = build(kind, mesh)
    optimizer = torch.optim.AdamW((model[0] if beside else model).parameters(), lr=0.01)
    extra: list[Any] = [torch.optim.AdamW(model[2].parameters(), lr=0.02), average_of(kind)] if beside else []
    loader = EvenLoader(elastic_loader(DataLoader(Rows(), 1, shuffle=True), global_batch_size=BATCH))
    seen: dict[int, dict[str, str]] = {}
    shared.setdefault("save_every", 1)
    checkpoints = AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job, extra=extra, **shared)
    first, source = checkpoints.step, checkpoints.restored.source.value if checkpoints.restored else None
    try:
        with checkpoints:
            for _ in loader.epochs(upto * BATCH // SAMPLES if finish else 100):
                for x, y in loader:
                    if checkpoints.step not in seen:
                        seen[checkpoints.step] = digests(checkpoints)
                        if checkpoints.step >= upto:
                            raise Stop
                    if kind == "fsdp":
                        model.set_requires_gradient_sync(loader.step_ends)
                    scale = (
                        loader.loss_scale / loader.sampler.plan.micro_batches if kind == "ddp" else loader.mean_scale
                    )
                    ((model(x) - y).square().mean() * scale).backward()
                    if loader.step_ends:
                        for one in (optimizer, *extra[:1]):
                            one.step()
                            one.zero_grad()
                        for one in extra[1:]:
                            one.update_parameters(model)
            seen[checkpoints.step] = digests(checkpoints)
    except Stop:
        pass
    weights = [one for parameter in model.parameters() for one in whole(parameter).detach().flatten().tolist()]
    return {"first": first, "source": source, "step": checkpoints.step, "seen": seen, "weights": weights}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    print(json.dumps(train(**given)))
    if not alone:
        dist.barrier()
        dist.destroy_process_group()
