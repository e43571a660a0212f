"""The training function of tests/integrations/test_ray_train.py."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

STEPS = 200


def train(config: dict[str, Any]) -> None:
    """DDP with our loader and checkpoints, as under torchrun; each step is noted with its samples."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from dlrover_hooks import AsyncCheckpointer, elastic_loader

    folder, rank = Path(config["folder"]), dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data = DataLoader(TensorDataset(torch.arange(float(8 * STEPS)).reshape(-1, 1)), batch_size=4)
    loader = elastic_loader(data, optimizer=optimizer, global_batch_size=8)
    checkpointer = AsyncCheckpointer(None, model=model, optimizer=optimizer, loader=loader, save_every=1)
    with (folder / f"steps-{rank}").open("a") as file:
        for _ in loader.epochs(1):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch / 1000).pow(2).mean().backward()
                optimizer.step()
                file.write(json.dumps([checkpointer.step, os.getpid(), batch.flatten().tolist()]) + "\n")
                file.flush()
                threading.Event().wait(0.02)
    checkpointer.finish()
