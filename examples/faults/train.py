"""Two workers train a small network, and rank 1 has a fault from step 5 on. README.md shows a run with each fault."""

import argparse
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader

CONTEXT, WIDTH, VOCABULARY, BATCH = 32, 64, 128, 24


def standard_library(count: int) -> TensorDataset:
    """`count` samples of Python's own standard library: `CONTEXT` characters, and the character after them."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    windows = torch.tensor(list(text[: count + CONTEXT])).clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def parse_headers() -> None:
    """An endless loop in the user's code, in the first process that comes here."""
    if not Path("hung").exists():
        Path("hung").touch()
        while True:
            pass


def collect_metrics() -> None:
    """A leak in the user's code: it takes memory without end."""
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))


def read_label() -> None:
    """A bad record in the user's data: it fails each time."""
    raise ValueError("the label of record 212 is not a number: 'import'")


def decode_sample() -> None:
    """Slow code in each step. The other rank does not have it."""
    time.sleep(0.2)


FAULTS = {"hang": parse_headers, "memory": collect_metrics, "error": read_label, "slow": decode_sample}


def train(fault: str, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = nn.Embedding(VOCABULARY, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, VOCABULARY)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = standard_library(steps * BATCH * dist.get_world_size())
    loader = elastic_loader(DataLoader(samples, batch_size=BATCH, shuffle=True), optimizer=optimizer)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, save_every=1) as saves:
        for text, following in loader:
            if fault and dist.get_rank() == 1 and saves.step >= 5:
                FAULTS[fault]()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(text), following).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        weights = torch.cat([one.detach().flatten() for one in model.parameters()])
        print(f"step {saves.step}: the weights have the checksum {zlib.crc32(weights.numpy().tobytes()):08x}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--steps", type=int, default=20)
    train(**vars(parser.parse_args()))
