"""A small GPT in the style of nanoGPT, trained on Python's standard library: random crops, gradient accumulation,
DistributedDataParallel, evaluation, a learning-rate schedule, and a checkpoint file of its own."""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks import AsyncCheckpointer, ElasticIndices, elastic_run

BLOCK, WIDTH, HEADS, LAYERS, VOCABULARY = 64, 64, 4, 2, 128
BATCH, STEP_BATCH = 8, 48  # crops in a micro-batch; crops in a step, over all processes
BEST = Path("best.pt")


def read(part: slice) -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[part]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files))).clamp(max=VOCABULARY - 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.mlp(self.norms[1](hidden))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(BLOCK, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(text) + self.place))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    crops = torch.stack([text[start : start + BLOCK + 1] for start in starts.tolist()])
    return crops[:, :-1], crops[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 20)
    return warm * (3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    model.eval()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - BLOCK, (4 * BATCH,), generator=generator)
    loss = model(*get_batch(text, starts)).item()
    model.train()
    return loss


def train(given: argparse.Namespace, model: nn.Module, optimizer, text: Tensor, micro, step: int) -> None:
    best, held_out = torch.load(BEST)["loss"] if BEST.exists() else math.inf, read(slice(40, 50))
    while step < given.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, given.steps)
        for starts in micro:
            (model(*get_batch(text, starts)) / len(micro)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % given.evaluate_every == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            gpt = getattr(model, "module", model)
            loss = evaluate(gpt, held_out)
            print(f"step {step}: held-out loss {loss:.4f}", flush=True)
            if loss < best:
                best, state = loss, {"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step, "loss": loss}, BEST.with_suffix(".new"))
                BEST.with_suffix(".new").replace(BEST)


@elastic_run
def main(given: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(1337 + rank)
    text, model = read(slice(0, 40)), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    saved: dict = torch.load(BEST) if BEST.exists() else {"step": 0}
    if saved["step"]:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    micro = ElasticIndices(len(text) - BLOCK, batch_size=BATCH, global_batch_size=STEP_BATCH, optimizer=optimizer)
    with AsyncCheckpointer("saved", model=model, optimizer=optimizer, loader=micro) as run:
        train(given, model, optimizer, text, micro, run.step)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--evaluate-every", type=int, default=50)
    main(parser.parse_args())
