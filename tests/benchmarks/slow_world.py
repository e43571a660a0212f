"""Ranks with little processor time or a slow disk, in a real job of three workers: is the right one named as slow?

Part of `make bench-health`. A rank that is drawn with a seed is moved into a control group of the kernel, which gives
it a tenth of a processor, or 50 reads of its disk per second. It is moved back when it is named, and the next one
follows when the launcher says that it is no longer slow. A blame is right if it names the rank, and the part of its
steps that takes longer: compute, or data.

Each sample is read past the page cache, from a file of its own. A window of the step times is half a second long, so
that a round does not take a minute; a rank is named after three of them.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.benchmarks.hang_world import WORLD, Blame
from tests.benchmarks.report import REPOSITORY
from tests.control_groups import throttled_disk, throttled_processor, within
from tests.waiting import until

SHARE, READS_PER_S = 0.1, 50
PHASES = {"processor": "compute", "disk": "data"}
WAIT_S = 60.0
SCRIPT = """
import mmap, os, time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover_hooks import AsyncCheckpointer, elastic_loader
from dlrover_hooks.worker import step_clock
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

step_clock.WINDOW_S = 0.5
BLOCK = 4096

class Samples(Dataset):
    def __init__(self, file):
        self.file = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self.count = os.fstat(self.file).st_size // BLOCK
        self.buffer = mmap.mmap(-1, BLOCK)

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        os.preadv(self.file, [self.buffer], index % self.count * BLOCK)
        return torch.full((8,), float(self.buffer[0]))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, batch):
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return self.one(batch)

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Samples(f"samples-{rank}"), batch_size=1, shuffle=True), optimizer=optimizer)
    with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader) as saves:
        for batch in loader:
            optimizer.zero_grad()
            net(batch).sum().mul(0.0).backward()
            optimizer.step()
            if saves.step == 20:
                Path(f"pid-{rank}.new").write_text(str(os.getpid()))
                Path(f"pid-{rank}.new").rename(f"pid-{rank}")
            ends = torch.tensor(float(os.path.exists("end")))
            dist.all_reduce(ends)  # all leave at the same step
            if ends:
                break

main()
"""


def slow_ranks(rounds: int, seed: int) -> dict[str, list[Blame]]:
    """By kind of fault, mixed in one job. Raises OSError or StopIteration if this user cannot make the groups."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(dir=REPOSITORY / "build") as name,
        SlowJob(Path(name)) as job,
        throttled_processor(SHARE) as processor,
        throttled_disk(job.folder, READS_PER_S) as disk,
    ):
        groups = {"processor": processor, "disk": disk}
        plan = [kind for kind in groups for _ in range(rounds)]
        chance.shuffle(plan)
        found: dict[str, list[Blame]] = {kind: [] for kind in groups}
        for kind in plan:
            found[kind].append(job.blame(chance.randrange(WORLD), groups[kind], PHASES[kind]))
        return found


class SlowJob:
    """A job whose ranks have files of their own. `blame` slows one of them down."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lines = folder, list[tuple[float, str]]()
        self._more = threading.Condition()

    def __enter__(self) -> SlowJob:
        for rank in range(WORLD):
            (self.folder / f"samples-{rank}").write_bytes(bytes(1 << 20))
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "dlrover_hooks", "run", "--nproc-per-node", str(WORLD), str(script)]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._more:
                self._lines.append((time.monotonic(), line))
                self._more.notify_all()

    def __exit__(self, *error: object) -> None:
        (self.folder / "end").touch()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        if self._process.returncode:
            sys.stderr.writelines(line for _, line in self._lines[-40:])

    def blame(self, rank: int, group: Path, phase: str) -> Blame:
        """Slow `rank` down until a rank is named, then wait until it is no longer slow."""
        pid = self._pid(rank)
        with within(group, pid):
            begun, seen = time.monotonic(), len(self._lines)
            said = self._said(seen, r"rank (\d+) \(.*\) is slow: its (\w+) takes")
        if said is None:
            return Blame(False, float("inf"))
        at, named = said
        right = (int(named[1]), named[2]) == (rank, phase)
        if not right:
            print(f"rank {rank} is slow in {phase}: {named[0]}", file=sys.stderr)
        self._said(seen, rf"rank {named[1]} \(.*\) is no longer slow")
        return Blame(right, at - begun)

    def _pid(self, rank: int) -> int:
        """Of the rank's process, once it trains."""
        file = self.folder / f"pid-{rank}"
        until(file.exists, f"rank {rank} at step 20", WAIT_S, diagnostic=lambda: [line for _, line in self._lines])
        return int(file.read_text())

    def _said(self, since: int, pattern: str) -> tuple[float, re.Match[str]] | None:
        """The first line from number `since` on that matches, and when it came. None: not within the wait."""

        def found() -> tuple[float, re.Match[str]] | None:
            matches = ((at, re.search(pattern, line)) for at, line in self._lines[since:])
            return next(((at, match) for at, match in matches if match is not None), None)

        with self._more:
            return self._more.wait_for(found, WAIT_S)
