"""How fast jobs start, grow and recover on Kubernetes, and whether anything is lost: `make bench-kubernetes`.

Writes build/bench/kubernetes.json and build/kubernetes.json. It starts the control plane that `make kubernetes` builds,
with process-backed Pods: images are not pulled, so times are those of the control plane, of Python and of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track

from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.owned_objects import OwnerKey
from dlrover_hooks.master.di_orchestrator.allocator import Allocator, JobInfo, NodeInfo, NodeList
from dlrover_hooks.master.di_orchestrator.policies import GoodputPolicy
from dlrover_hooks.master.operator.job_objects import MasterOptions
from dlrover_hooks.master.operator.operator import Operator
from dlrover_hooks.protocol import NodeResource
from tests.benchmarks.kubernetes_faults import FaultRounds
from tests.benchmarks.report import REPOSITORY, Figures, report
from tests.kubernetes import control_plane as shared
from tests.kubernetes.job_cluster import Cluster
from tests.kubernetes.trained_script import TrainedScript
from tests.waiting import until

ROUNDS, JOBS = 21, 5
MOST_WORKERS = 8
BATCH = 24
"""Eight workers have equal shares of it."""
NODES, DI_JOBS = 5000, 2000
LONG_S = 300.0
BARS = {"events_lost": 0, "orphans_after_delete": 0, "plans_left": 1, "allocator_5000_nodes_s": 2.0}


class CountingApi(ApiServer):
    """Counts requests by their method; a watch is one."""

    def __init__(self, kubeconfig: str) -> None:
        super().__init__(kubeconfig=kubeconfig)
        self.sent = Counter[str]()

    def _call(self, method: str, path: str, body: Any, query: dict[str, Any]) -> Manifest:
        self.sent[method] += 1
        return super()._call(method, path, body, query)


class CountingOperator(Operator):
    """Counts how often it has compared a job with what there is."""

    reconciled = 0

    def _reconcile(self, key: OwnerKey) -> bool:
        self.reconciled += 1
        return super()._reconcile(key)


class BenchCluster(Cluster):
    """`Cluster`, whose operator counts."""

    def start_counting(self) -> tuple[CountingApi, CountingOperator]:
        """Start the operator, with the rights of its account."""
        api = CountingApi(self.kubeconfig)
        operator = CountingOperator(api, self.namespace, MasterOptions(port=self.port))
        operator.start()
        self._operator = operator
        return api, operator


class Job:
    """A job that trains until it is deleted."""

    def __init__(self, cluster: BenchCluster, folder: Path) -> None:
        folder.mkdir()
        self.cluster, self.script = cluster, TrainedScript(folder)
        sizes = [str(one) for one in (100 * BATCH, BATCH, 1000)]
        command = ["dlrover-hooks", "run", "--standby", "0", str(self.script.path), str(folder), *sizes]
        self._began = time.monotonic()
        cluster.job(command, str(folder / "saved"), replicas=1, maxReplicas=MOST_WORKERS)

    def step_of(self, world: int, without: str = "") -> float:
        """Wait for a step that so many workers have made, none of them on the node `without`; seconds since the last
        change.
        """
        until(lambda: self.script.stepped(world, without), f"a step of {world} workers", LONG_S,
              diagnostic=self.cluster.said)  # fmt: skip
        return time.monotonic() - self._began

    def scale(self, count: int) -> float:
        """Seconds until a step of so many workers."""
        self._began = time.monotonic()
        self.cluster.kubectl("scale", "elasticjob/mine", f"--replicas={count}")
        return self.step_of(count)

    def kill_a_worker(self, world: int) -> float:
        """Seconds from the end of a Pod's processes to the next step of the whole world."""
        kubelet, namespace = self.cluster.plane.kubelet, self.cluster.namespace
        name = max(one for one in kubelet.alive(namespace) if "worker" in one)
        self._began = time.monotonic()
        os.killpg(kubelet.pid(namespace, name), signal.SIGKILL)
        return self.step_of(world, without=name.removeprefix("mine-"))

    def delete(self) -> int:
        """What is left of it, at most a minute later: objects and processes."""
        self.cluster.kubectl("delete", "elasticjob", "mine")

        def left() -> int:
            objects = self.cluster.get("pods,services,secrets,scaleplans", "-l", "elasticjob-name=mine")["items"]
            return len(objects) + len(self.cluster.plane.kubelet.alive(self.cluster.namespace))

        with contextlib.suppress(AssertionError):  # then it is counted
            until(lambda: not left(), "the end of all that belongs to the job", 60.0)
        return left()


def of_jobs(folder: Path, count: int) -> Figures:
    """The figures of whole jobs, medians; the first one also grows and loses workers."""
    cluster = BenchCluster()
    api, operator = cluster.start_counting()
    starts, relaunches, orphans, grown, plans = list[float](), list[float](), 0, None, 0
    try:
        for number in track(range(count), "jobs"):
            job = Job(cluster, folder / f"job-{number}")
            starts.append(job.step_of(1))
            if not number:
                grown = job.scale(MOST_WORKERS)
                job.scale(2)
            else:
                job.scale(2)
            relaunches.append(job.kill_a_worker(2))
            plans = max(plans, len(cluster.get("scaleplans")["items"]))
            orphans += job.delete()
        sent = sum(count for method, count in api.sent.items() if method != "watch")
        per_reconcile = sent / operator.reconciled
    finally:
        cluster.close()
        api.close()
    return {
        "submit_to_first_step_s": statistics.median(starts), "scale_1_to_8_s": grown,
        "relaunch_after_kill_s": statistics.median(relaunches), "orphans_after_delete": orphans,
        "plans_left": plans, "api_requests_per_reconcile": per_reconcile,
    }  # fmt: skip


def of_faults(rounds: int, first: int) -> Figures:
    """Whether a change is lost when parts of the control plane are killed."""
    faults = FaultRounds(shared.control_plane())
    try:
        for seed in track(range(first, first + rounds), "faults"):
            faults.play(seed)
        faults.left()
    finally:
        faults.close()
    found = faults.found
    for problem in found.problems:
        print(f"lost: {problem}")
    return {
        "events_lost": found.lost, "events": found.events, "fault_rounds": found.rounds, "relists": found.relists,
        "plans_left": found.plans_left,
    }  # fmt: skip


def of_allocator() -> Figures:
    """Seconds of CPU to divide 5,000 nodes among 2,000 jobs, by the policy that considers all jobs together."""
    dice = random.Random(7)
    nodes = {f"n{one}": NodeInfo(f"n{one}", NodeResource(64, 512 * 1024, "", 8)) for one in range(NODES)}
    jobs = dict[str, JobInfo]()
    for number in range(DI_JOBS):
        key, wanted = f"training/job-{number}", dice.choice((1, 2, 4, 8, 16, 32, 64))
        speeds = {str(one): 10.0 * one**0.8 for one in (1, 2, 4)}
        jobs[key] = JobInfo(key, (NodeResource(8, 64 * 1024, "", 1),), replicas=wanted, submitted_s=number,
                            profilings={"speeds": speeds})  # fmt: skip
    allocator, before = Allocator(GoodputPolicy()), dict[str, NodeList]()
    times = list[float]()
    for _ in range(3):  # from nothing, then with what they have
        began = time.process_time()
        before = allocator.allocate_all(jobs, nodes, before)
        times.append(time.process_time() - began)
    assert sum(map(len, before.values())) > NODES, "they were placed"
    return {"allocator_5000_nodes_s": max(times)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="with a fault each")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-kubernetes-"))
    found: Figures = {}
    try:
        parts: list[Callable[[], Figures]] = [
            of_allocator, lambda: of_faults(given.rounds, given.seed), lambda: of_jobs(folder, given.jobs),
        ]  # fmt: skip
        for part in parts:
            for name, value in part().items():
                found[name] = max(value or 0, found.get(name) or 0) if name in found else value
    finally:
        shared.close()
        shutil.rmtree(folder, ignore_errors=True)
    conditions = {"rounds": given.rounds, "jobs": given.jobs, "nodes": NODES, "di_jobs": DI_JOBS}
    code = report("kubernetes", "Kubernetes, with process-backed Pods", conditions, found, BARS)
    (REPOSITORY / "build" / "kubernetes.json").write_text(json.dumps({**conditions, **found}, indent=1) + "\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
