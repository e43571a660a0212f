"""`make simulate SEEDS=FIRST:LAST`: run seeds on all processors and say what happened. Exit code 1: a promise broke.

`make simulate-masters` does the same with several masters on one journal in etcd, `make simulate-roles` with jobs of
several roles.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.simulation.leaders import simulate_masters
from tests.simulation.roles.roles_world import simulate_roles
from tests.simulation.world import Result, simulate

_TELL_S = 5.0
_TASKS = 10
"""A process of the pool ends after so many chunks of seeds, and its garbage with it."""


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if not first.isdigit() or not (last or first).isdigit():
        raise SystemExit(f"SEEDS={text}: expected FIRST:LAST, such as 1:2000")
    return range(int(first), int(last or first) + 1)


class Summary:
    """What was seen so far."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seeds = self.events = self.jobs = 0
        self.hours = 0.0
        self.faults: Counter[str] = Counter()
        self.broken: list[Result] = []

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.events += result.events
        self.jobs += result.jobs
        self.hours += result.hours
        self.faults.update(result.faults)
        if result.broken is not None:
            self.broken.append(result)

    def line(self) -> str:
        rate = self.seeds / max(1e-3, time.monotonic() - self.began)
        return (
            f"{self.seeds} seeds ({rate:.0f}/s), {self.jobs} jobs, {self.events} events, {self.hours:.1f} simulated "
            f"hours, {self.faults.total()} faults, {len(self.broken)} broken"
        )

    def tell(self) -> None:
        print(self.line())
        spent = os.times()
        cpu_s = spent.user + spent.system + spent.children_user + spent.children_system
        print(f"{cpu_s:.0f} s of CPU, {1000 * cpu_s / max(1, self.seeds):.0f} ms for a seed")
        for kind, count in sorted(self.faults.items()):
            print(f"  {count:7d}  {kind}")
        if self.broken:
            first = min(self.broken, key=lambda result: result.seed)
            print(f"\n{first.report}")
            print(f"broken seeds: {' '.join(str(seed) for seed in sorted(result.seed for result in self.broken)[:50])}")


def _begin() -> None:
    """In a new process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a seed leaves half a MiB of cycles, which end with the process: see `_TASKS`


def main(text: str, work: Callable[[int], Result]) -> int:
    """Ctrl-C ends it with what was seen so far, and 130."""
    seeds, summary, told_at = _seeds(text), Summary(), time.monotonic()
    workers = min(os.cpu_count() or 1, len(seeds))
    with multiprocessing.Pool(workers, _begin, maxtasksperchild=_TASKS) as pool:
        try:
            for result in pool.imap(work, seeds, chunksize=max(1, min(20, len(seeds) // workers))):
                summary.add(result)
                if time.monotonic() > told_at + _TELL_S:
                    told_at = time.monotonic()
                    print(summary.line(), flush=True)
            pool.close()
        except KeyboardInterrupt:
            pool.terminate()
        pool.join()
    summary.tell()
    if summary.seeds < len(seeds):
        return 130
    return 1 if summary.broken else 0


if __name__ == "__main__":
    kind = sys.argv[2] if len(sys.argv) > 2 else ""
    sys.exit(main(sys.argv[1], {"": simulate, "masters": simulate_masters, "roles": simulate_roles}[kind]))
