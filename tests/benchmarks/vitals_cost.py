"""What the vitals of a node with 8 workers cost: `python -m tests.benchmarks.vitals_cost [SECONDS]`.

A process of its own sends the reports of a launcher to a real master, at the default interval, and says how much CPU
time it used. Its 8 workers have 4 processes each beside themselves, as with 4 DataLoader workers, and 300 processes on
the machine belong to nobody. To that is added what the 8 workers need for their own figures, without an accelerator.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.vitals.background_sample import EVERY_S
from dlrover_hooks.vitals.node_reports import NodeReports
from dlrover_hooks.worker.resource_usage import Sampler
from tests.benchmarks.report import Figures
from tests.e2e.master_process import LiveMaster

WORKERS, CHILDREN, OTHERS = 8, 4, 300
SECONDS = 60.0
BARS = {"vitals_cpu_pct": 0.5}
JOB, NODE, AGENT = "vitals-cost", "node", "agent"


def measured(seconds: float = SECONDS) -> Figures:
    """`vitals_cpu_pct`: CPU of a node's vitals, in percent of a core; and its two parts."""
    with contextlib.ExitStack() as owned:
        master = LiveMaster(Path(owned.enter_context(tempfile.TemporaryDirectory())))
        owned.callback(master.close)
        workers = owned.enter_context(_processes())
        order = json.dumps([master.url, master.token, workers, seconds])
        command = [sys.executable, "-m", "tests.benchmarks.vitals_cost", "--report", order]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=seconds + 120)
        launcher = 100 * float(done.stdout)
        view = master.client("viewer").call(p.ShowVitals(JOB))
        trees = [rank.processes.processes for rank in view.ranks if rank.processes is not None]
        assert trees == [1 + CHILDREN] * WORKERS, view
    own = WORKERS * 100 * _own_cost_s() / EVERY_S
    return {"vitals_cpu_pct": launcher + own, "launcher_cpu_pct": launcher, "workers_cpu_pct": own}


@contextlib.contextmanager
def _processes() -> Iterator[dict[str, int]]:
    """Process ids of idle workers with children, by incarnation; beside processes that are none of theirs."""
    tree = f"for _ in {' '.join('x' * CHILDREN)}; do sleep 3600 & done; wait"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(OTHERS):
            started.append(subprocess.Popen(["sleep", "3600"], start_new_session=True))
        roots = [subprocess.Popen(["sh", "-c", tree], start_new_session=True) for _ in range(WORKERS)]
        started += roots
        yield {f"w{index}": root.pid for index, root in enumerate(roots)}
    finally:
        for one in started:
            os.killpg(one.pid, 9)
            one.wait()


def _own_cost_s() -> float:
    """CPU seconds of one sample of a worker's own process."""
    sampler, samples = Sampler("the bench"), 200
    sampler.sample()
    began = time.process_time()
    for _ in range(samples):
        sampler._due = 0.0
        sampler.sample()
    sampler.stop()
    return (time.process_time() - began) / samples


def _report(url: str, token: str, workers: dict[str, int], seconds: float) -> None:
    """Report as a launcher does for so long; prints the CPU seconds that a second needed."""
    client = MasterClient(url, token, incarnation=AGENT)
    seats = tuple(p.Seat(worker, index) for index, worker in enumerate(workers))
    client.call(p.Join(JOB, AGENT, NODE, seats, "127.0.0.1", 0, WORKERS, WORKERS, "run"))
    client.call(p.AwaitRound(JOB, AGENT))
    reports = NodeReports(client, JOB, AGENT, NODE, os.getcwd())
    reports.follow(workers)
    reports.start()
    used, began = time.process_time(), time.monotonic()
    threading.Event().wait(seconds)
    print((time.process_time() - used) / (time.monotonic() - began))
    reports.stop()
    client.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--report"]:
        given: list[Any] = json.loads(sys.argv[2])
        _report(*given)
    else:
        print(json.dumps(measured(*map(float, sys.argv[1:])), indent=1))
