"""How many workers one master holds, and what a request costs it: `make bench-master`.

Real workers' connections as far as this machine's limit on open files allows; beyond that the measured costs of fewer
workers are multiplied. CPU time is that of the master's process. Writes build/bench/master.json.
BENCH_ARGS: `--requests N` (how long the memory is watched; 2000000 takes a quarter of an hour), `--pairs N`,
`--workers N`, `--events N`, `--only NAME`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console

from tests.benchmarks.core_load import WORKERS, rendezvous_figures, restart_figures
from tests.benchmarks.crowd_load import crowd_figures, most_workers
from tests.benchmarks.lease_load import lease_figures, memory_figures
from tests.benchmarks.report import Figures, report

FEW, SOME = 500, 2000
LOST = 0.1
BARS = {
    "lease_cpu_over_echo": 2.0,
    "rss_mib_10k_workers": 200.0,
    "rendezvous_10k_core_s": 2.0,
    "restart_ready_s": 3.0,
}
"""What each figure must not exceed."""
AT_LEAST = {"workers_held_one_core": 10_000.0}


def held_figures(workers: int) -> Figures:
    """The same costs with more and more workers; those of the most are what `WORKERS` workers are derived from."""
    found: Figures = {}
    for count in (FEW, SOME, workers):
        crowd = crowd_figures(count, share_lost=LOST if count == workers else 0.0)
        found |= {
            f"{name}_{count}": crowd[name] for name in ("interval_s", "beats_per_s", "beat_cpu_us", "poll_cpu_us")
        }
        found[f"core_share_{count}"] = crowd["core_share"]
    most = {name: value or 0.0 for name, value in crowd.items()}
    scale = WORKERS / most["workers"]
    grown = most["rss_mib"] - most["rss_empty_mib"]
    return found | {
        "workers_real_connections": most["workers"],
        "workers_held_one_core": most["workers"] / most["core_share"],
        "rss_mib_10k_workers": most["rss_empty_mib"] + scale * grown,
        "rss_mib_real_workers": most["rss_mib"],
        "form_s": most["form_s"],
        "mass_failure_reform_s": most["reform_s"],
        "mass_failure_reform_cpu_s": most["reform_cpu_s"],
    }


def groups(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Group by group: a title, and what measures it."""
    yield "core", rendezvous_figures
    yield "leases", lambda: lease_figures(given.pairs)
    yield "workers", lambda: held_figures(most_workers(given.workers))
    yield "restart", lambda: restart_figures(given.events)
    yield "memory", lambda: memory_figures(given.requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--only", help="one group of figures, such as leases")
    given = parser.parse_args()
    console, found = Console(), Figures()
    load = os.getloadavg()[0]
    for title, measure in groups(given):
        if given.only in (None, title):
            with console.status(title):
                found |= measure()
    conditions = {"pairs": given.pairs, "load_before": load, "load_after": os.getloadavg()[0]}
    return report("master", "The master at 10,000 workers", conditions, found, BARS, AT_LEAST)


if __name__ == "__main__":
    sys.exit(main())
