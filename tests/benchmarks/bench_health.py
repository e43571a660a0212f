"""Is the right rank blamed, how fast, and is anything restarted without need? What do vitals and checks cost?

`make bench-health`. Faults are injected into real jobs (`hang_world`, `slow_world`) and real node checks (`bad_nodes`);
jobs without a fault run in virtual time (`stall_load`), and so does the check of 1,000 nodes (`node_check_load`). Needs
root: some faults are limits of control groups. Takes about half an hour with 20 rounds of each fault. Writes
build/bench/health.json. BENCH_ARGS: `--rounds N`, `--seed N`, `--only GROUP`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from tests.benchmarks import bad_nodes, hang_world, node_check_load, slow_world, stall_load, vitals_cost
from tests.benchmarks.hang_world import Blame
from tests.benchmarks.report import Figures, report

BARS = {"false_restarts": 0.0, "vitals_cpu_pct": 0.5, "check_1000_nodes_s": 60.0}
AT_LEAST = {"blame_right_pct": 95.0}
CALM_JOBS = 200


def _rate(blames: list[Blame]) -> float:
    return 100.0 * statistics.mean(one.right for one in blames)


def _faults(rounds: int, seed: int) -> Figures:
    """Faults in real jobs and node checks."""
    found = {
        "silent": hang_world.silent(rounds, seed),
        "stalls": hang_world.stalls(rounds, seed),
        "user_errors": hang_world.user_errors(rounds, seed),
        "out_of_memory": hang_world.out_of_memory(rounds, seed),
        **{f"slow_{part}": blames for part, blames in slow_world.slow_ranks(rounds, seed).items()},
        "bad_nodes": bad_nodes.bad_nodes(rounds, seed),
    }
    right = {f"blame_right_{name}_pct": _rate(blames) for name, blames in found.items()}
    seconds = {name: statistics.median(one.seconds for one in blames) for name, blames in found.items()}
    return {
        "blame_right_pct": _rate([one for blames in found.values() for one in blames]),
        **right,
        "detect_hang_s": seconds["silent"],
        "detect_stall_s": seconds["stalls"],
        "detect_slow_processor_s": seconds["slow_processor"],
        "detect_slow_disk_s": seconds["slow_disk"],
        "check_3_nodes_s": seconds["bad_nodes"],
        "user_error_ends_s": seconds["user_errors"],
        "user_error_ends_max_s": max(one.seconds for one in found["user_errors"]),
    }


def _calm(rounds: int, seed: int) -> Figures:
    """Jobs without a fault."""
    del rounds
    found = stall_load.calm(CALM_JOBS, seed)
    hours = CALM_JOBS * stall_load.HOUR_S / 3600
    return {"calm_hours": hours, "false_restarts": found.restarts, "false_reports_per_hour": found.reports / hours}


def _vitals(rounds: int, seed: int) -> Figures:
    """What sampling a node costs."""
    del rounds, seed
    return vitals_cost.measured()


def _node_check(rounds: int, seed: int) -> Figures:
    """A check of 1,000 simulated nodes."""
    del rounds, seed
    return node_check_load.measure()


GROUPS: dict[str, Callable[[int, int], Figures]] = {
    "calm": _calm,
    "node_check": _node_check,
    "vitals": _vitals,
    "faults": _faults,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=GROUPS)
    asked = parser.parse_args()
    figures: Figures = {}
    for name in [asked.only] if asked.only else GROUPS:
        began = time.monotonic()
        figures |= GROUPS[name](asked.rounds, asked.seed)
        print(f"{name}: measured in {time.monotonic() - began:.0f} s", flush=True)
    conditions = {"rounds": asked.rounds, "seed": asked.seed}
    return report("health", "Health: who is blamed, and when", conditions, figures, BARS, AT_LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
