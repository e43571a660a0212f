"""A small GPT reads Python's own standard library, on as many nodes as pay: the master finds out how many these are.

    dlrover-hooks run --mode single-job --max-workers 4 --max-cpu 4 --job mine examples/scaling/train.py

`dlrover-hooks plans mine` shows what was planned, and why. `demo.py` beside this script draws it.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run

CONTEXT, WIDTH, VOCABULARY = 64, 64, 128


class StandardLibrary(Dataset):
    def __init__(self, windows: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: windows * CONTEXT + 1]
        self.windows = torch.tensor(list(text)).clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.001)  # a store that answers after a millisecond: more readers help
        return self.windows[index]


class CharacterGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.block(self.embed(text[:, :-1]) + self.place, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


@elastic_run
def train(given: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(CharacterGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inner = DataLoader(StandardLibrary(given.windows), batch_size=16, shuffle=True)
    loader = elastic_loader(inner, optimizer=optimizer, global_batch_size=64)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader) as saved:
        logged = saved.step
        for _ in loader.epochs(given.epochs):
            for text in loader:
                loss = model(text)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if given.log and dist.get_rank() == 0 and saved.step > logged:  # a step may have several batches here
                    logged = saved.step
                    with open(given.log, "a") as log:
                        log.write(f"{time.time()},{saved.step},{dist.get_world_size()},{loss.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=int, default=6400)
    parser.add_argument("--log", default="", help="rank 0 appends a line for each step: time, step, workers, loss")
    train(parser.parse_args())
