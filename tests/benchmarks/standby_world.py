"""How long a lost worker keeps the world from being full again, with a warm standby: an arm of `make bench-recovery`.

A DDP job of three workers with two DataLoader workers each, under `elastic_run` and `dlrover-hooks run --standby 1`.
Once a standby waits, one worker is killed in the middle of a step; the time runs until all three, the standby's worker
among them, have made the step after. The victims take turns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.report import REPOSITORY, Figures
from tests.waiting import json_lines, until

WORLD = 3
SCRIPT = """
import json, os, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run

pace = threading.Event()

def note(**what):
    line = json.dumps({"t": time.time(), "pid": os.getpid(), "rank": dist.get_rank(), "world": dist.get_world_size(),
                       "local": int(os.environ["LOCAL_RANK"]), "round": int(os.environ["DLROVER_HOOKS_ROUND"]), **what})
    with open(sys.argv[1], "a") as file:
        file.write(line + chr(10))

@elastic_run(max_recoveries=1000)
def train():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    inner = DataLoader(TensorDataset(torch.randn(6000, 64)), batch_size=4, num_workers=2)
    loader = elastic_loader(inner, optimizer=optimizer, global_batch_size=12)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader) as checkpoints:
        for _ in loader.epochs(1000):
            for (x,) in loader:
                loss = model(x).square().mean()
                pace.wait(0.02)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                note(step=checkpoints.step)
    dist.destroy_process_group()

train()
"""


class Job:
    """A launched job of `world` workers, its launcher, and what its workers have noted."""

    def __init__(self, folder: Path, script: str, world: int, *options: str) -> None:
        self.world, self.notes = world, folder / "notes.jsonl"
        self.notes.touch()
        (folder / "train.py").write_text(script)
        command = [sys.executable, "-m", "dlrover_hooks", "run", "--nproc-per-node", str(world), *options]
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*command, str(folder / "train.py"), str(self.notes)], env=env, cwd=folder, stdout=self.log, stderr=self.log
        )

    def steps(self) -> list[dict[str, Any]]:
        """One row per worker and optimizer step."""
        return json_lines(self.notes)

    def until(self, condition: Callable[[], Any]) -> Any:
        """The first true answer of `condition`. Raises AssertionError, at once if the launcher has ended."""
        return until(condition, "what the job does", 120.0, between=self._runs, diagnostic=self._last, every_s=0.02)

    def _runs(self) -> None:
        assert self.process.poll() is None, f"the launcher has ended:\n{self._last()}"

    def _last(self) -> str:
        return self.said()[-4000:]

    def said(self) -> str:
        """By the launcher and the workers."""
        return Path(self.log.name).read_text()

    def standbys(self) -> int:
        """So many idle ones wait: the launcher's children of that command line, less the server and those in a seat."""
        in_seats, count = {row["pid"] for row in self.steps()}, 0
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                count += "dlrover_hooks.launcher.warm.fork_server" in child.cmdline() and child.pid not in in_seats
        return count - 1

    def world_after(self, number: int) -> list[dict[str, Any]]:
        """The first steps of all ranks in a full world later than round `number`; nothing before all have made one."""
        first: dict[int, dict[str, Any]] = {}
        for row in self.steps():
            if row["round"] > number and row["world"] == self.world:
                first.setdefault(row["rank"], row)
        return list(first.values()) if len(first) == self.world else []

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        self.log.close()


def kill_one(job: Job, local_rank: int, *, idle: int = 1, together: bool = False) -> tuple[float, int]:
    """Seconds until the full world has made its next step, and the steps that were lost. `idle` standbys wait before.

    `together`: all workers start again; else the others keep their process.
    """
    job.until(lambda: job.standbys() >= idle)
    last = max((row for row in job.steps() if row["local"] == local_rank), key=lambda row: row["t"])
    os.kill(last["pid"], signal.SIGKILL)
    killed = time.time()
    world = job.until(lambda: job.world_after(last["round"]))
    before = [row for row in job.steps() if row["round"] <= last["round"] and row["pid"] != last["pid"]]
    made = max(row["step"] for row in before)  # what only the dead one had was not made
    replaced = {row["pid"] for row in world} - {row["pid"] for row in before}
    assert len(replaced) == (job.world if together else 1), "more than the dead one was replaced"
    return max(row["t"] for row in world) - killed, made + 1 - min(row["step"] for row in world)


def measure(rounds: int) -> Figures:
    """Median and maximum over that many kills, and the optimizer steps lost in all of them."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), SCRIPT, WORLD, "--standby", "1", "--max-restarts", "1000")
        try:
            job.until(lambda: len(job.steps()) > 10 * WORLD)
            kills = [kill_one(job, turn % WORLD) for turn in range(rounds)]
        finally:
            job.end()
    taken = [seconds for seconds, _ in kills]
    return {
        "standby_full_world_s": statistics.median(taken),
        "standby_full_world_max_s": max(taken),
        "standby_steps_lost": float(sum(lost for _, lost in kills)),
    }
