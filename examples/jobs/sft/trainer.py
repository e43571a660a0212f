"""The role `trainer`: trains the model, and uses the hooks of this library like any script."""

from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run
from dlrover_hooks.job import current_worker


class Instructions(Dataset):
    """The samples of the role `dataset`, fetched in batches."""

    def __init__(self) -> None:
        self.role = current_worker().role("dataset")
        self.count = self.role.call("count")

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, positions: list[int]) -> list[Any]:
        return self.role.call("tokens", list(positions))


def collated(rows: list[Any]) -> tuple[Tensor, Tensor]:
    tokens, asked = zip(*rows, strict=True)
    return torch.tensor(tokens), torch.tensor(asked)


@elastic_run
def trainer() -> None:
    config = current_worker().config
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(resolve_name(config["model"])())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inner = DataLoader(Instructions(), batch_size=16, shuffle=True, collate_fn=collated)
    loader = elastic_loader(inner, optimizer=optimizer)
    with AsyncCheckpointer(config["save_to"], model=model, optimizer=optimizer, loader=loader) as saved:
        for epoch in loader.epochs(config["epochs"]):
            losses = []
            for tokens, asked in loader:
                loss = model(tokens, asked)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if dist.get_rank() == 0:
                print(f"epoch {epoch} ends at step {saved.step}: loss {sum(losses) / len(losses):.3f}", flush=True)
    dist.destroy_process_group()
