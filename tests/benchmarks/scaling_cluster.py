"""Synthetic clusters: jobs that arrive and share nodes of one kind, in rounds, by three policies."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from dlrover_hooks.master.scaling.allocation import Demand, JobConfiguration, allocate

NODES, JOBS, ROUND_S, RESTART_S = 64, 40, 60.0, 30.0
SIZES = (1, 2, 4, 8, 16)
ALONE_S = (600.0, 7200.0)
"""Shortest and longest time of a job on one node, by the logarithm evenly."""


class ClusterJob(msgspec.Struct):
    """`scaling`: goodput on n nodes is `n ** scaling`. Seconds; `work`: seconds on one node."""

    name: str
    arrives: float
    work: float
    scaling: float
    nodes: int = 0
    done: float = 0.0
    restarts: int = 0
    ends: float = 0.0

    def goodput(self, nodes: int) -> float:
        return float(nodes) ** self.scaling if nodes else 0.0


Policy = Callable[[list[ClusterJob], float], dict[str, int]]
"""Nodes for each of the jobs that wait or run, in order of arrival, at this time."""


def jobs(seed: int) -> list[ClusterJob]:
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.uniform(0, 1800, JOBS))
    work = np.exp(random.uniform(math.log(ALONE_S[0]), math.log(ALONE_S[1]), JOBS))
    scaling = random.uniform(0.5, 1.0, JOBS)
    rows = enumerate(zip(arrivals, work, scaling, strict=True))
    return [ClusterJob(f"job-{n}", float(at), float(seconds), float(power)) for n, (at, seconds, power) in rows]


def first_come(present: list[ClusterJob], now: float) -> dict[str, int]:
    """8 nodes a job, the first that arrived first."""
    return {job.name: 8 for job in present[: NODES // 8]}


def equal_shares(present: list[ClusterJob], now: float) -> dict[str, int]:
    share = NODES // len(present)
    return {job.name: max(size for size in SIZES if size <= share) for job in present}


def program(present: list[ClusterJob], now: float) -> dict[str, int]:
    """The integer program."""
    demands = [
        Demand(
            job.name,
            tuple(JobConfiguration("node", size, job.goodput(size)) for size in SIZES),
            current=("node", job.nodes) if job.nodes else None,
            age_s=now - job.arrives, restarts=job.restarts, restart_s=RESTART_S,
        )
        for job in present
    ]  # fmt: skip
    return {name: one.nodes for name, one in allocate(demands, {"node": NODES}).given.items()}


def run(seed: int, policy: Policy) -> tuple[float, float]:
    """Makespan in seconds, and Jain's index of the jobs' speeds, each compared with an eighth of the cluster alone."""
    every, now = jobs(seed), 0.0
    while any(not job.ends for job in every):
        present = [job for job in every if job.arrives <= now and not job.ends]
        given = policy(present, now) if present else {}
        assert sum(given.values()) <= NODES
        for job in present:
            _advance(job, given.get(job.name, 0), now)
        now += ROUND_S
    speeds = np.array([job.work / job.goodput(8) / (job.ends - job.arrives) for job in every])
    return max(job.ends for job in every), float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))


def _advance(job: ClusterJob, nodes: int, now: float) -> None:
    """One round; a change of the nodes costs `RESTART_S` of it."""
    lost = RESTART_S if nodes and job.nodes and nodes != job.nodes else 0.0
    job.restarts += bool(lost)
    job.nodes = nodes
    speed = job.goodput(nodes)
    if speed and job.done + speed * (ROUND_S - lost) >= job.work:
        job.ends = now + lost + (job.work - job.done) / speed
    job.done += speed * (ROUND_S - lost)
