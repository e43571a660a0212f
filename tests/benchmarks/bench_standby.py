"""What a worker's start costs, cold, booted and from a warm standby: `make bench-standby`.

Seconds from the order to the script's first statement and to the end of its first AdamW step, the median of interleaved
rounds; and the memory of an idle standby. A booted worker imports ahead of its script (and of its join), so its first
statement comes late and its first step soon after. Writes build/bench/standby.json. BENCH_ARGS: `--rounds N`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from dlrover_hooks.config import worker_environment
from dlrover_hooks.launcher.warm.standby_pool import Standbys
from tests.benchmarks.report import report
from tests.waiting import until

SCRIPT = """
import sys, time
first = time.time()
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
from dlrover_hooks.worker import preimport_list as preload
preload.tell()
with open(sys.argv[1], "w") as file:
    file.write(f"{first} {time.time()}")
"""
BARS = {"standby_first_statement_s": 0.2, "standby_first_step_s": 0.5}
Start = Callable[[list[str]], object]


def measured(folder: Path, start: Start) -> tuple[float, float]:
    """Seconds to the first statement and to the first step of one worker."""
    times, began = folder / "times", time.time()
    start([str(folder / "script.py"), str(times)])
    first, stepped = map(float, times.read_text().split())
    times.unlink()
    return first - began, stepped - began


def rounds(folder: Path, number: int) -> dict[str, float]:
    """All arms in turn, so often."""
    env = worker_environment(DLROVER_HOOKS_PRELOAD=str(folder / "preload"))
    python = [sys.executable, "-u"]

    def cold(command: list[str], *boot: str) -> None:
        subprocess.run([*python, *boot, *command], env=env, check=True)

    def booted(command: list[str]) -> None:
        cold(command, "-m", "dlrover_hooks.launcher.warm.worker_bootstrap", "--")

    def warm(command: list[str]) -> None:
        worker = standbys.take("worker", ["--", *command], env)
        assert worker is not None
        assert worker.wait(60) == worker.reap() == 0

    measured(folder, cold)  # tells its imports, and warms the page cache
    standbys = Standbys(2, str(folder / "preload"), env)
    arms: dict[str, Start] = {"cold": cold, "boot": booted, "standby": warm}
    taken: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(number):
        for arm, start in arms.items():
            _fill(standbys)
            taken[arm].append(measured(folder, start))
    _fill(standbys)
    found = {
        f"{arm}_first_{what}_s": statistics.median(times[place] for times in taken[arm])
        for arm in arms
        for place, what in enumerate(("statement", "step"))
    }
    found |= _memory(standbys)
    standbys.close()
    return found


def _fill(standbys: Standbys) -> None:
    until(lambda: standbys.ready >= 2, "two standbys", 120.0, between=standbys.refill)


def _memory(standbys: Standbys) -> dict[str, float]:
    """Of the server with two standbys, MiB: what an idle standby has alone, and its share with what it shares."""
    family = [one.memory_full_info() for one in psutil.Process().children()]
    idle = min(family, key=lambda one: one.uss)
    return {
        "idle_uss_mib": idle.uss / 2**20,
        "idle_pss_mib": idle.pss / 2**20,
        "all_pss_mib": sum(one.pss for one in family) / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    number = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "script.py").write_text(SCRIPT)
        conditions = {"rounds": number, "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        found = rounds(Path(name), number)
    return report(
        "standby", f"start of a worker, median of {number}: {json.dumps(conditions)}", conditions, found, BARS
    )


if __name__ == "__main__":
    sys.exit(main())
