"""How many samples per second a Brain takes in over HTTP: `make bench-brain`. Writes build/bench/brain.json.

One Brain process on loopback. Jobs of four workers and two servers send batches as a `StatsReporter` does, each from a
thread of one client process; then plans of running jobs are asked for, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import requests

from dlrover_hooks.master.brain.messages import PATHS, AskPlan, RegisterJob, ReportSamples
from dlrover_hooks.master.scaling import OptimizeStage
from tests.benchmarks.report import report
from tests.brain_jobs import sample, timed, told
from tests.e2e.brain_process import BrainProcess
from tests.e2e.postgresql_process import PostgresqlProcess

JOBS, BATCH, BATCHES, PLANS = 8, 20, 300, 40
AT_LEAST = {"samples_per_s_sqlite": 3000}


def post(session: requests.Session, url: str, message: msgspec.Struct) -> None:
    answer = session.post(
        url + PATHS[type(message)][0], data=msgspec.json.encode(message), headers={"Content-Type": "application/json"},
        timeout=60,
    )  # fmt: skip
    answer.raise_for_status()


def samples_per_s(url: str, batches: int) -> float:
    """Of all jobs together."""

    def one(name: str) -> None:
        with requests.Session() as session:
            post(session, url, RegisterJob(name, told().limits, ps=True))
            batch = ReportSamples(name, timed(*[sample(4, ps=2)] * BATCH))
            for _ in range(batches):
                post(session, url, batch)

    began = time.monotonic()
    with ThreadPoolExecutor(JOBS) as threads:
        list(threads.map(one, [f"job-{number}" for number in range(JOBS)]))
    return JOBS * batches * BATCH / (time.monotonic() - began)


def plan_ms(url: str) -> float:
    """Of a plan for a running job with some thousand samples, the median."""
    took = []
    with requests.Session() as session:
        for number in range(PLANS):
            message = AskPlan(f"job-{number % JOBS}", OptimizeStage.RUNNING, 1_000_000)
            began = time.monotonic()
            post(session, url, message)
            took.append(1000 * (time.monotonic() - began))
    return statistics.median(took)


def measured(database: str, folder: Path, batches: int) -> tuple[float, float]:
    """Samples per second, milliseconds of a plan."""
    brain = BrainProcess(folder, database)
    try:
        return samples_per_s(brain.url, batches), plan_ms(brain.url)
    finally:
        brain.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=BATCHES, help="of each job")
    batches = parser.parse_args().batches
    server = PostgresqlProcess()
    try:
        with tempfile.TemporaryDirectory() as folder:
            sqlite = measured(str(Path(folder, "brain.db")), Path(folder), batches)
            postgresql = measured(server.database(), Path(folder), batches)
    finally:
        server.close()
    found = {
        "samples_per_s_sqlite": sqlite[0],
        "samples_per_s_postgresql": postgresql[0],
        "plan_ms_sqlite": sqlite[1],
        "plan_ms_postgresql": postgresql[1],
    }
    conditions = {"jobs": JOBS, "samples_per_request": BATCH, "nodes_per_sample": 6, "requests": JOBS * batches,
                  "postgresql": "fsync off"}  # fmt: skip
    return report("brain", "One Brain", conditions, found, {}, AT_LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
