"""A Ray cluster of several nodes on this machine, one raylet each, and how a node is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from dlrover_hooks import protocol as p
from dlrover_hooks.job import DLJobBuilder
from tests.waiting import until

ROLES = "tests.contracts.job_roles"
REPOSITORY = Path(__file__).parents[2]
EDGE = "edge"
"""A resource of every node but the head. A worker that needs it never runs beside the masters."""


class Nodes:
    """`head` keeps the cluster's state; the others have the resource `EDGE`, so many each."""

    def __init__(self, edges: int, *, each: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
        self.stopped: list[psutil.Process] = []
        """Processes of nodes that hang."""
        self.edges = [self.add(each) for _ in range(edges)]

    def add(self, each: int = 1) -> Any:
        return self.cluster.add_node(num_cpus=2, resources={EDGE: each})

    def of(self, worker_node: str) -> Any:
        """The node with this name, as workers have it."""
        return next(one for one in self.edges if one.node_id.startswith(worker_node))

    def processes(self, node: Any) -> list[psutil.Process]:
        """The raylet of a node, and what it has started."""
        raylets = node.all_processes["raylet"]
        raylet = psutil.Process(raylets[0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def lose(self, node: Any) -> None:
        """As when its machine loses power."""
        for one in self.processes(node):
            one.kill()

    def hang(self, node: Any) -> list[psutil.Process]:
        """As when its machine stops, and may go on later. Send SIGCONT to these processes then."""
        stopped = self.processes(node)
        self.stopped += stopped
        for one in stopped:
            os.kill(one.pid, signal.SIGSTOP)
        return stopped


@contextmanager
def several_nodes(edges: int, *, each: int = 1) -> Iterator[Nodes]:
    """The cluster, with this process connected to it."""
    import ray

    made = Nodes(edges, each=each)
    try:
        ray.init(address=made.cluster.address, namespace="dlrover_hooks", log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()


def job(folder: Path, name: str = "job") -> DLJobBuilder:
    return DLJobBuilder(name).config(folder=str(folder)).env(PYTHONPATH=str(REPOSITORY))


def runs(handle: Any, role: str, rank: int, life: int = 1) -> p.RoleWorker:
    def found() -> p.RoleWorker | None:
        for one in handle.status().workers:
            if (one.role, one.rank, one.life, one.state) == (role, rank, life, p.WorkerState.RUNNING):
                return one
        return None

    return until(found, f"life {life} of {role} {rank} runs", 120.0, diagnostic=lambda: handle.status().events)
