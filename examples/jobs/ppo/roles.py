"""The roles with a model: `rollout` answers prompts, and `trainer` learns from the rewards of the answers."""

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from policy import Policy, checksum, encoded, ppo_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run
from dlrover_hooks.job import WorkerContext, current_worker


def rollout() -> None:
    held = [(-1, Policy())]  # the newest weights, with their version

    def load(version: int, weights: dict[str, Tensor]) -> None:
        policy = Policy()
        policy.load_state_dict(weights)
        held[0] = version, policy

    def generate(rows: list[Any], version: int) -> list[Any]:
        """(kind, its log probability) for each row. A repeated call returns the same."""
        has, policy = held[0]
        if has != version:
            return [None] * len(rows)  # this process began after the last `load`
        logs = policy(encoded(rows))[0].detach()
        chance = torch.Generator().manual_seed(version * 1_000_003 + rows[0][0])
        kinds = torch.multinomial(logs.exp(), 1, generator=chance)
        return list(zip(kinds[:, 0].tolist(), logs.gather(1, kinds)[:, 0].tolist(), strict=True))

    current_worker().serve(load=load, generate=generate)


def explored(worker: WorkerContext, policy: nn.Module, positions: list[int], version: int) -> list[Tensor]:
    """Encoded prompts, drawn kinds, their log probabilities, and rewards, for one batch."""
    rollouts, answers = worker.role("rollout"), [None]
    rows = worker.role("prompts").call("batch", positions)
    while None in answers:
        rollouts.broadcast("load", version, policy.state_dict())
        answers = rollouts.shard("generate", rows, version)
    kinds, logs = zip(*answers, strict=True)
    rewards = worker.role("reward").shard("score", list(zip(positions, kinds, strict=True)))
    return [encoded(rows), *map(torch.tensor, (kinds, logs, rewards))]


@elastic_run
def trainer() -> None:
    worker = current_worker()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    inner = DataLoader(TensorDataset(torch.arange(worker.config["prompts"])), batch_size=32, shuffle=True)
    loader = elastic_loader(inner, optimizer=optimizer)
    with AsyncCheckpointer(model=policy, optimizer=optimizer, loader=loader) as saved:
        for epoch in loader.epochs(worker.config["epochs"]):
            for (batch,) in loader:
                positions, step = batch.tolist(), saved.step
                experience = explored(worker, policy.module, positions, step)
                record(worker, epoch=epoch, step=step, positions=positions, reward=experience[-1].mean().item())
                for _ in range(worker.config["updates"]):
                    optimizer.zero_grad()
                    ppo_loss(policy, *experience).backward()
                    optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {saved.step}: the weights have the checksum {checksum(policy)}", flush=True)
    dist.destroy_process_group()


def record(worker: WorkerContext, **line: Any) -> None:
    """Append to the file of this round and rank. Called before the step, so that a kill loses no record of a step."""
    path = os.path.join(worker.config["folder"], f"{os.environ['DLROVER_HOOKS_ROUND']}-{dist.get_rank()}.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps(line | {"at": time.time()}) + "\n")
