"""Functions of roles that use torch, for the tests of jobs on both backends."""

from __future__ import annotations

import os
import threading

from dlrover_hooks import elastic_run
from tests.contracts.job_roles import folder


def reduce() -> None:
    """All-reduces until the test ends. Its process group cannot be re-created without new processes."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    while True:
        over = torch.tensor(float((folder() / "end").exists()))
        dist.all_reduce(over)
        if over > 0:
            break
        threading.Event().wait(0.01)
    dist.destroy_process_group()


@elastic_run
def train() -> None:
    """Trains with DDP, and recovers without new processes."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from dlrover_hooks import AsyncCheckpointer, elastic_loader

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(4096, 4)), batch_size=8)
    loader = elastic_loader(data, optimizer=optimizer)
    checkpointer = AsyncCheckpointer(None, model=model, optimizer=optimizer, loader=loader)
    steps = 0
    for _ in loader.epochs(100_000):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            steps += 1
            (folder() / f"steps-{os.getpid()}").write_text(str(steps))
            over = torch.tensor(float((folder() / "end").exists()))
            dist.all_reduce(over)
            if over > 0:
                checkpointer.close()
                return
            threading.Event().wait(0.01)
