"""A script that trains on planned nodes and notes the samples of each step, for `Launched`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SAMPLES, BATCH, EPOCHS = 4000, 8, 8
FOLDER = "PLANNED_RUN_FOLDER"

TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run

SAMPLES, BATCH, EPOCHS = (int(word) for word in os.environ["PLANNED_RUN_SIZES"].split())
folder = os.environ["PLANNED_RUN_FOLDER"]

class Numbers(Dataset):
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        return torch.tensor([float(index)])

@elastic_run
def train():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = elastic_loader(DataLoader(Numbers(), batch_size=BATCH, shuffle=True), optimizer=optimizer,
                            global_batch_size=BATCH)
    pause = threading.Event()
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader) as saved:
        for epoch in loader.epochs(EPOCHS):
            for numbers in loader:
                model(numbers).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                world = dist.get_world_size()
                note(step=saved.step, epoch=epoch, world=world, ids=[int(one) for one in numbers.flatten()])
                # two workers are slower than one: the plan for the second one is taken back
                if not os.path.exists(folder + "/hurry"):
                    pause.wait(0.05 * world)
    dist.destroy_process_group()

train()
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables of the script. A file `hurry` in `folder` ends its pauses."""
    return {FOLDER: str(folder), "PLANNED_RUN_SIZES": f"{SAMPLES} {BATCH} {EPOCHS}"}


def wrong_steps(rows: list[dict[str, Any]]) -> list[int]:
    """The steps of a whole run that are missing, or were not made exactly once by the workers of one world together."""
    samples = dict.fromkeys(range(1, EPOCHS * SAMPLES // BATCH + 1), 0)
    for row in rows:
        samples[row["step"]] += len(row["ids"])
    return [step for step, count in samples.items() if count != BATCH]
