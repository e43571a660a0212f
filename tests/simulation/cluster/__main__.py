"""`make simulate-cluster`: a day of 5,000 nodes and 2,000 jobs (`SEED=N`: other faults). Exit code 1: a promise broke.

Writes build/cluster-day.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import msgspec

from dlrover_hooks.master.di_orchestrator.policies import GoodputPolicy
from tests.simulation.cluster.day import ClusterDay, DaySize

OUT = Path(__file__).parents[3] / "build" / "cluster-day.json"


def main() -> int:
    usual = DaySize()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=usual.nodes)
    parser.add_argument("--jobs", type=int, default=usual.jobs)
    parser.add_argument("--hours", type=float, default=usual.hours)
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    began = time.process_time()
    day = ClusterDay(given.seed, DaySize(given.nodes, given.jobs, given.hours), GoodputPolicy())
    day.tell = lambda: print(day.line(), flush=True)
    found = day.play()
    cpu_s = time.process_time() - began
    print(f"{found.events} events, {found.requests} requests to the API server, {cpu_s:.0f} s of CPU")
    for what, count in (*sorted(found.faults.items()), *sorted(found.phases.items())):
        print(f"  {what}: {count}")
    for problem in found.broken[:20]:
        print(f"BROKEN: {problem}")
    OUT.parent.mkdir(exist_ok=True)
    figures = msgspec.to_builtins(found) | {
        "seed": given.seed,
        "nodes": given.nodes,
        "jobs": given.jobs,
        "cpu_s": cpu_s,
    }
    OUT.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{len(found.broken)} promises broken; {OUT.relative_to(OUT.parents[1])}")
    return 1 if found.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
