"""Two workers of Ray Train learn to guess the next character of Python's own standard library.

    pip install 'dlrover-hooks[torch,ray]' 'ray[train]'
    python examples/ray_train/train.py --kill

With --kill one of them is killed (SIGKILL). Ray Train starts both again. They resume from the newest snapshot in
memory, and make the steps after it again. The model has a buffer that counts how often each sample was trained in each
epoch. It is in the snapshots, like the weights. Exit code 1 if a count is not 1.
"""

import argparse
import os
import signal
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader
from dlrover_hooks.integrations.ray import RayTrainHooks

EPOCHS, SAMPLES, STEPS, KILL_AT = 2, 4000, 250, 123


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Ray Train has initialised the process group before. `prepare_model` wraps the model in DDP."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: SAMPLES * 9]
    data = TensorDataset(torch.arange(SAMPLES), torch.tensor(list(text)).clamp(max=127).reshape(SAMPLES, 9))
    torch.manual_seed(1)
    bare = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    bare.register_buffer("counts", torch.zeros(EPOCHS, SAMPLES, dtype=torch.long))
    model, losses, notes = prepare_model(bare), list[float](), Path(given["notes"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastic_loader(DataLoader(data, 16, shuffle=True), optimizer=optimizer)  # without prepare_data_loader
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, save_every=given["save_every"]) as saved:
        for epoch in loader.epochs(EPOCHS):
            for samples, characters in loader:
                loss = nn.functional.cross_entropy(model(characters[:, :8]), characters[:, 8])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                dist.all_reduce(trained := torch.bincount(samples, minlength=SAMPLES))
                bare.get_buffer("counts")[epoch] += trained
                if dist.get_rank() == 1:
                    again = notes.exists() and str(KILL_AT) in notes.read_text().split()
                    with notes.open("a") as file:
                        file.write(f"{saved.step}\n")
                    if given["kill"] and saved.step == KILL_AT and not again:
                        os.kill(os.getpid(), signal.SIGKILL)
    return {"counts": bare.get_buffer("counts").tolist(), "loss": sum(losses[-50:]) / 50}  # Ray refuses tensors here


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", action="store_true", help=f"kill a worker once, after step {KILL_AT} of {STEPS}")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one snapshot to the next (default: 5)")
    given, began = parser.parse_args(), time.monotonic()
    ray.init(os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        again, workers = FailureConfig(max_failures=3), ScalingConfig(num_workers=2)
        run = RunConfig(storage_path=folder, failure_config=again, callbacks=[cast(Any, RayTrainHooks())])
        config = vars(given) | {"notes": f"{folder}/notes"}
        trainer = TorchTrainer(train, train_loop_config=config, scaling_config=workers, run_config=run)
        result: Any = trainer.fit().return_value
        made = len(Path(config["notes"]).read_text().split())
    print(f"{STEPS} steps, {made - STEPS} made again, loss {result['loss']:.2f}, {time.monotonic() - began:.0f} s")
    wrong = sum(count != 1 for epoch in result["counts"] for count in epoch)
    sys.exit(f"{wrong} counts are not 1" if wrong else 0)
