"""What a change of the parameter servers costs: `make bench-ps`.

Real processes under `dlrover-hooks run --ps`, with a raw model that is cut over the servers. Each time is measured from
the event (the command, the kill) to the end of the 16th step on the new cluster. Writes build/bench/ps.json.
BENCH_ARGS: `--rounds N` (5).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from tests.benchmarks.report import Figures, report
from tests.integrations.ps_job import CHIEF, PYTHON, PSJob, environment, ps_job
from tests.waiting import until

SHARDS, STEPS = 6000, 16
WATCHDOG_S = 5.0
"""Lease of a parameter server here; a stopped one is found by it."""
BARS = {"scale_up_s": 2.0, "scale_down_s": 2.0, "migrate_s": 2.0, "crash_s": 4.0, "wedged_s": WATCHDOG_S + 5.0,
        "steps_lost": 0.0}  # fmt: skip
AT_LEAST = {"shards_applied_once": 1.0, "bit_exact": 1.0}
Rows = list[dict[str, Any]]


class Clock:
    """The rows of a job, read on from where the last look ended."""

    def __init__(self, job: PSJob) -> None:
        self._job, self._at = job, 0
        self.rows: Rows = []

    def look(self) -> Rows:
        with self._job.lives.open() as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._at += len(line)
                self.rows.append(json.loads(line))
        return self.rows

    def newest(self) -> dict[str, Any]:
        return next((row for row in reversed(self.look()) if "step" in row), {"version": 0, "pid": 0, "step": 0})

    def seconds(self, event: Callable[[], object], *, key: str = "version") -> float:
        """From `event` to the 16th step with another `key`."""
        before, count = self.newest(), len(self.rows)
        began = time.time()
        event()

        def done() -> float | None:
            new = [row["at"] for row in self.look()[count:] if "step" in row and row[key] != before[key]]
            return new[STEPS - 1] - began if len(new) >= STEPS else None

        return until(done, f"{STEPS} steps with another {key}", 120.0, diagnostic=lambda: self._job.said[-20:])


def settled(job: PSJob) -> None:
    job.scale()


def measure(rounds: int, folder: Path) -> Figures:
    """One job; each kind of event `rounds` times, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ("up", "down", "migrate", "crash", "wedged", "chief")}
    plan = {"samples": 2 * SHARDS, "size": 2, "save_every": "2s"}
    sizes = ["--hang-timeout", f"{WATCHDOG_S:g}s", "--max-restarts", "1000"]
    with ps_job(folder, "bench-ps", plan, *sizes, ps=1, workers=2) as job:
        clock = Clock(job)
        until(lambda: clock.newest()["step"] > 100, "the first steps", 120.0, diagnostic=lambda: job.said[-20:])
        for _ in range(rounds):
            times["up"].append(clock.seconds(lambda: job.scale("--ps", "2", "--no-wait")))
            settled(job)
            times["migrate"].append(clock.seconds(lambda: job.scale("--migrate", "ps:1", "--no-wait")))
            settled(job)
            times["crash"].append(clock.seconds(lambda: job.kill("ps 1")))
            settled(job)
            times["wedged"].append(clock.seconds(lambda: job.kill("ps 1", signal.SIGSTOP)))
            settled(job)
            times["down"].append(clock.seconds(lambda: job.scale("--ps", "1", "--no-wait")))
            settled(job)
            times["chief"].append(clock.seconds(lambda: job.kill("chief"), key="pid"))
            settled(job)
        job.end()
        rows = clock.look()
    seen = next(row["seen"] for row in rows if "seen" in row)
    names = {"up": "scale_up_s", "down": "scale_down_s", "chief": "chief_restart_s"}
    found: Figures = {names.get(name, f"{name}_s"): statistics.median(one) for name, one in times.items()}
    return found | {"shards_applied_once": float(seen == [1] * SHARDS)}


def planned(folder: Path) -> Figures:
    """Steps that were made twice over planned changes only."""
    folder.mkdir()
    with ps_job(folder, "bench-ps", {"samples": 2000, "size": 2, "holds": [200, 400, 600]}) as job:
        for step, change in ((200, ["--ps", "3"]), (400, ["--migrate", "ps:0"]), (600, ["--ps", "1"])):
            job.row("holds", step)
            job.scale(*change, "--no-wait")
            job.release(step)
        job.end()
        return {"steps_lost": float(len(job.steps()) - len(set(job.steps())))}


def exact(folder: Path) -> Figures:
    """Weights and slots over 2 -> 1 -> 2 -> 3 parameter servers."""
    command = [str(PYTHON), str(CHIEF.with_name("ps_exact.py")), "raw"]
    env = environment(folder)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200)
    return {"bit_exact": float(json.loads(done.stdout)["bit_exact"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Console().status("parameter servers"):
        folder = Path(name)
        found = measure(given.rounds, folder) | planned(folder / "planned") | exact(folder)
    conditions = {
        "rounds": given.rounds,
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": os.getloadavg()[0],
        "watchdog_s": WATCHDOG_S,
    }
    return report("ps", "parameter servers that come and go", conditions, found, BARS, AT_LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
