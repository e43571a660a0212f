"""A real run that is scaled 1 -> 2 -> 1 while it trains: what that costs in steps, and for how long no step is made."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.e2e.launched import ALIVE, REPOSITORY, Launched
from tests.e2e.planned_script import TRAIN, environment, wrong_steps


def interruption() -> dict[str, float]:
    """`plan_interrupt_steps`: lost or made twice. `plan_pause_s`: the longest time between two steps in a row while a
    node is added, without that of its removal; `plan_removal_pause_s`: the same while one is removed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        noted = textwrap.dedent(ALIVE).replace('"rank"', '"at": time.time(), "rank"', 1)
        job = Launched(folder, noted + TRAIN, "--mode", "manual", "--max-workers", "2", **environment(folder))
        job.wait_for(lambda rows: len(rows) > 20, 120.0)
        _scale(job, 2)
        rows = job.wait_for(lambda rows: sum(row["world"] == 2 for row in rows) > 20, 120.0)
        added = _longest_pause(rows)
        _scale(job, 1)
        job.says("others are preempted", 120.0)
        at = len(job.read())
        rows = job.wait_for(lambda rows: len(rows) > at + 20, 120.0)
        removed = _longest_pause(rows[at - 40 :])
        (folder / "hurry").touch()
        code, said = job.end(600.0)
        if code:
            raise RuntimeError(f"the job ended with {code}: {said[-2000:]}")
        return {
            "plan_interrupt_steps": len(wrong_steps(job.read())),
            "plan_pause_s": added,
            "plan_removal_pause_s": removed,
        }


def _scale(job: Launched, workers: int) -> None:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(job.temporary)}
    command = [sys.executable, "-m", "dlrover_hooks", "scale", "--job", job.job, "--workers", str(workers)]
    subprocess.run(command, env=env, check=True, timeout=180, stdout=subprocess.DEVNULL)


def _longest_pause(rows: list[dict]) -> float:
    times = sorted(row["at"] for row in rows)
    return max(after - before for before, after in itertools.pairwise(times))
