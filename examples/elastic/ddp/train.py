"""A small GPT reads Python's own standard library on three workers. One worker dies; the others do not restart.

    dlrover-hooks run --nproc-per-node 1:3 examples/elastic/ddp/train.py --lose-at 30

The survivors keep their processes. Within a second they continue training at the step where they were.
"""

import argparse
import os
import signal
import sysconfig
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


@elastic_run(on_recover=lambda news: print(f"rank {news.rank} of {news.world_size} goes on at step {news.step}"))
def train(given: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(CharacterGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inner = DataLoader(StandardLibrary(given.windows), batch_size=8, shuffle=True, num_workers=2)
    loader = elastic_loader(inner, optimizer=optimizer, global_batch_size=48)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader) as saved:
        for epoch in loader.epochs(given.epochs):
            for text in loader:
                model(text).backward()
                optimizer.step()
                optimizer.zero_grad()
                if saved.step == given.lose_at and dist.get_rank() == 1 and dist.get_world_size() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} ends at step {saved.step} with {dist.get_world_size()} workers")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=2400)
    parser.add_argument("--lose-at", type=int, default=0, help="rank 1 kills itself after this step")
    train(parser.parse_args())
