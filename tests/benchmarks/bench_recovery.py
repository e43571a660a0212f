"""What a loss costs, beside stock torchrun: `make bench-recovery`.

Real processes, killed mid-step. Each group of figures is a module of its own: `GROUPS` names the function that
measures it, given the number of rounds. Writes build/bench/recovery.json. BENCH_ARGS: `--rounds N` (10), `--only GROUP`
(several times), which leaves what the file has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import psutil
import torch
from rich.console import Console

from tests.benchmarks import default_world, rendezvous_load, standby_world, survivors, tells, torchruns
from tests.benchmarks.report import REPOSITORY, Figures, report

GROUPS: dict[str, Callable[[int], Figures]] = {
    "default": default_world.measure,
    "survivors": survivors.measure,
    "growth": survivors.growth,
    "lightning": survivors.lightning,
    "tells": tells.measure,
    "rendezvous": rendezvous_load.measure,
    "torchrun": torchruns.ours,
    "stock": torchruns.stock,
    "standby": standby_world.measure,
}
BARS = {
    "default_next_step_s": 1.0,
    "default_lightning_next_step_s": 1.5,
    "survivor_next_step_s": 0.8,
    "survivor_next_step_max_s": 2.0,
    "survivor_next_step_w8_s": 2.0,
    "survivor_next_step_w16_s": 2.0,
    "standby_full_world_s": 2.5,
    "hang_next_step_s": 4.0,
    "steps_lost": 0.0,
    "standby_steps_lost": 0.0,
    "newcomer_stall_s": 1.0,
    "lightning_next_step_s": 2.0,
    "lightning_steps_lost": 0.0,
    "rendezvous_1000_after_last_join_s": 1.0,
}
"""What each figure must not exceed."""
AT_LEAST = {"ratio_vs_torchrun": 5.0}


def ratio(found: Figures) -> Figures:
    """How many times as long stock torchrun takes with a last call of a second. Without a recovery there is none."""
    mine, theirs = found.get("survivor_next_step_s"), found.get("c10d_1s_restart_s")
    return {"ratio_vs_torchrun": theirs / mine} if mine and theirs else {}


def before() -> Figures:
    """Figures of earlier calls, so that groups can be measured one by one."""
    try:
        return json.loads((REPOSITORY / "build" / "bench" / "recovery.json").read_text())
    except FileNotFoundError:
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group of figures, such as torchrun")
    given = parser.parse_args()
    console, found = Console(), before() if given.only else Figures()
    for group in given.only or GROUPS:
        began = time.perf_counter()
        with console.status(group):
            found |= GROUPS[group](given.rounds)
        console.print(f"{group}: measured in {time.perf_counter() - began:.0f} s")
    conditions = {
        "rounds": given.rounds,
        "cores": psutil.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    figures = {name: value for name, value in found.items() if name not in conditions}
    figures |= ratio(figures)
    return report("recovery", "Recovery: what a loss costs", conditions, figures, BARS, AT_LEAST)


if __name__ == "__main__":
    sys.exit(main())
