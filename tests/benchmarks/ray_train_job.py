"""The peer of `make bench-ray`: Ray Train's recovery of a trainer with two workers, one of which is killed."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from tests.waiting import until


def train(config: dict[str, Any]) -> None:
    """All reduces for ever, and notes each step: rank, pid and time."""
    import ray.train
    import torch
    import torch.distributed as dist

    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    while not (folder / "end").exists():
        over = torch.tensor(float((folder / "end").exists()))
        dist.all_reduce(over)
        (folder / f"step-{rank}").write_text(f"{os.getpid()} {time.time()}")
        threading.Event().wait(0.01)


def recovery_s(folder: Path, kills: int) -> dict[str, float]:
    """Median of the seconds from a kill until both workers make steps again."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train, train_loop_config={"folder": str(folder)}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )  # fmt: skip
    fitted = threading.Thread(target=trainer.fit, daemon=True)
    fitted.start()

    def steps() -> dict[int, tuple[int, float]]:
        found = {}
        for rank in range(2):
            pid, at = (folder / f"step-{rank}").read_text().split()
            found[rank] = (int(pid), float(at))
        return found

    def both(after: float) -> Any:
        try:
            found = steps()
        except (OSError, ValueError):
            return None
        return found if all(at > after for _, at in found.values()) else None

    times = list[float]()
    for _ in range(kills):
        now = until(lambda: both(time.time() - 0.5), "both train", 180.0)
        killed_at = time.time()
        os.kill(now[1][0], signal.SIGKILL)
        until(lambda at=killed_at, pids=now: (found := both(at)) and found[1][0] != pids[1][0], "both again", 180.0)
        times.append(time.time() - killed_at)
    (folder / "end").touch()
    fitted.join(60.0)
    return {"ray_train_recovery_s": statistics.median(times)}
