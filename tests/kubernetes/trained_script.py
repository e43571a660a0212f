"""A script that trains in Pods, notes the samples of each step, and keeps its weights at the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.waiting import json_lines

SAMPLES, BATCH, EPOCHS = 2400, 12, 4  # one, two and three workers have equal shares of a batch
STEPS = EPOCHS * SAMPLES // BATCH

_TRAIN = """
import json, os, sys, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run

folder, SAMPLES, BATCH, EPOCHS = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)

class Numbers(Dataset):
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        return index, torch.sin(torch.arange(8.0) * (index + 1))

@elastic_run
def train():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = elastic_loader(DataLoader(Numbers(), batch_size=BATCH, shuffle=True), optimizer=optimizer,
                            global_batch_size=BATCH)
    pause = threading.Event()
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader) as saved:
        for epoch in loader.epochs(EPOCHS):
            for indices, numbers in loader:
                (model(numbers) - numbers.flip(1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                line = {"step": saved.step, "epoch": epoch, "world": dist.get_world_size(),
                        "rank": dist.get_rank(), "ids": indices.tolist(),
                        "node": os.environ["DLROVER_HOOKS_NODE"]}
                with open(folder + "/steps.jsonl", "a") as file:
                    file.write(json.dumps(line) + chr(10))
                if not os.path.exists(folder + "/hurry"):
                    pause.wait(0.1)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), folder + "/weights.pt")
    dist.destroy_process_group()

train()
"""


class TrainedScript:
    """`folder`: where it writes. A file `hurry` there ends its pauses."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights = folder, folder / "weights.pt"
        self.path = folder / "train.py"
        self.path.write_text(_TRAIN)

    @property
    def command(self) -> list[str]:
        """Of a Pod, or of a launcher."""
        sizes = [str(one) for one in (SAMPLES, BATCH, EPOCHS)]
        return ["dlrover-hooks", "run", "--standby", "0", str(self.path), str(self.folder), *sizes]

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def rows(self) -> list[dict[str, Any]]:
        """One for each batch of a worker."""
        path = self.folder / "steps.jsonl"
        return json_lines(path) if path.exists() else []

    def stepped(self, world: int, without: str = "", since: int = 0) -> bool:
        """After the row `since` a step was made by so many workers, none of them on the node `without`."""
        nodes = dict[int, set[str]]()
        for row in self.rows()[since:]:
            if row["world"] == world:
                nodes.setdefault(row["step"], set()).add(row["node"])
        return any(len(found) == world and without not in found for found in nodes.values())

    def check_samples(self) -> None:
        """Each step was made once by the workers of one world together, whose ranks have no gap, with each sample of an
        epoch once.
        """
        rows = self.rows()
        ranks = dict[int, list[int]]()
        for row in rows:
            ranks.setdefault(row["step"], []).append(row["rank"])
            assert row["rank"] < row["world"]
        assert all(sorted(found) == list(range(len(found))) for found in ranks.values())
        made = Counter[int]()
        for row in rows:
            made[row["step"]] += len(row["ids"])
        assert made == dict.fromkeys(range(1, STEPS + 1), BATCH)
        for epoch in range(EPOCHS):
            ids = Counter(index for row in rows if row["epoch"] == epoch for index in row["ids"])
            assert ids == dict.fromkeys(range(SAMPLES), 1)
