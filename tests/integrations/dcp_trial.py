"""One rank that saves FSDP2 state by DCP: `python -m ... URL`. Prints what the model was when it was saved."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from dlrover_hooks.integrations.dcp import FlashStager, FlashWriter


def model_and_optimizer() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """Sizes that no world size divides."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 2, bias=False))
    model.register_buffer("seen", torch.tensor(3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 33)).square().mean().backward()
    optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    model, _ = model_and_optimizer()
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stager, sums = FlashStager(), {}
    shards: list[Any] = [*model.parameters()]
    for number in (1, 2, 3):
        step(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state,
                 "loop": {"epoch": number, "seen": (1, {2: "b"}), "order": OrderedDict(a=1.5)}}  # fmt: skip
        sums = {name: _whole(tensor).tolist() for name, tensor in model_state.items()}
        future: Any = dcp.async_save(state, storage_writer=FlashWriter(sys.argv[1], step=number), async_stager=stager)
        with torch.no_grad():
            kept = [parameter.to_local().clone() for parameter in shards]
            for parameter in shards:
                parameter.to_local().fill_(float("nan"))  # the step behind it must not be seen in the file
            future.result()
            for parameter, old in zip(shards, kept, strict=True):
                parameter.to_local().copy_(old)
    stager.close()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(sums) + "\n")
    dist.destroy_process_group()


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    main()
