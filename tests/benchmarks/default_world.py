"""What a lost worker costs with the README's command and no flag: two arms of `make bench-recovery`.

`dlrover-hooks run --nproc-per-node 2 train.py`: a plain DDP loop under `elastic_run`, and a Lightning `Trainer` with
an `ElasticCallback`, each with two DataLoader workers. Once the launcher says that its warm standbys are ready, and as
many wait, one worker is killed; the time runs until both workers, the replacement among them, have made the step after.
The victims take turns; ten kills are what a launcher restarts without a flag. A third arm kills workers of a plain
loop without `elastic_run`: all start again.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.report import Figures
from tests.benchmarks.standby_world import SCRIPT, Job, kill_one

WORLD = 2
PLAIN = SCRIPT.replace("global_batch_size=12", "global_batch_size=8")
LIGHTNING = """
import json, os, sys, threading, time
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from dlrover_hooks.integrations.lightning import ElasticCallback

pace = threading.Event()

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1))

    def training_step(self, batch, _):
        pace.wait(0.02)
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        note = {"t": time.time(), "pid": os.getpid(), "rank": self.global_rank, "world": self.trainer.world_size,
                "local": int(os.environ["LOCAL_RANK"]), "round": int(os.environ["DLROVER_HOOKS_ROUND"]),
                "step": self.global_step}
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps(note) + chr(10))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

if __name__ == "__main__":
    seed_everything(1)
    trainer = Trainer(callbacks=[ElasticCallback(save_to="saved")], max_epochs=1000, accelerator="cpu",
                      devices=int(os.environ["WORLD_SIZE"]), logger=False, enable_checkpointing=False)
    data = TensorDataset(torch.randn(6000, 64))
    trainer.fit(Net(), DataLoader(data, batch_size=4, num_workers=2, shuffle=True))
"""


def measure(rounds: int) -> Figures:
    """All arms."""
    rounds = min(rounds, 10)
    plain, cost = _killed(PLAIN, rounds)
    lightning, _ = _killed(LIGHTNING, rounds)
    again, _ = _killed(PLAIN.replace("@elastic_run(max_recoveries=1000)", ""), max(rounds // 2, 1), together=True)
    return {
        "default_next_step_s": statistics.median(plain),
        "default_next_step_max_s": max(plain),
        "default_lightning_next_step_s": statistics.median(lightning),
        "default_lightning_next_step_max_s": max(lightning),
        "default_all_again_s": statistics.median(again),
        "standby_mb": cost,
    }


def _killed(script: str, rounds: int, *, together: bool = False) -> tuple[list[float], float]:
    """Seconds to the next step of the whole world, for each kill; and what the launcher says its standbys cost."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), script, WORLD)
        try:
            job.until(lambda: len(job.steps()) > 10 * WORLD)
            said = job.until(lambda: re.search(r"ready to replace workers at once, for (\d+) MiB", job.said()))
            taken = [kill_one(job, turn % WORLD, idle=WORLD, together=together)[0] for turn in range(rounds)]
        finally:
            job.end()
    return taken, float(said[1])
