"""`/metrics`: the master's metrics in the Prometheus text format."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrover_hooks.master.core import node_vitals
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.core.roles.role_state import restart_counts
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.protocol import NodeUse, RankUse, WorkerState

_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)


class Metrics:
    """The metrics of one master process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dlrover_hooks_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self._commits = Histogram(
            "dlrover_hooks_journal_commit_seconds", "Time of one journal commit.", buckets=_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self._events = Counter(
            "dlrover_hooks_journal_events", "Events journaled by this process.", registry=self.registry
        )

    def committed(self, seconds: float, events: int) -> None:
        """Count a durable batch of `events` events."""
        self._commits.observe(seconds)
        self._events.inc(events)

    def text(self, state: Master, nodes: Nodes) -> bytes:
        """All metrics; those of the jobs are computed from `state` and `nodes`."""
        registry = CollectorRegistry()
        registry.register(_Jobs(state, nodes))
        registry.register(_Roles(state))
        registry.register(_Uses(state, nodes))
        return generate_latest(self.registry) + generate_latest(registry)


SERIES = 500
"""Most unfinished jobs that get series of their own: those with the newest events. `dlrover_hooks_jobs` counts all."""


USES = 128
"""Most nodes, and most ranks, with series of what they use: those of unfinished jobs, by job, name and rank.
Writing them takes tens of milliseconds, in which the master answers no request."""


class _Jobs(Collector):
    def __init__(self, state: Master, nodes: Nodes) -> None:
        self._state, self._nodes = state, nodes

    def collect(self) -> Iterator[Metric]:
        rounds = CounterMetricFamily("dlrover_hooks_rounds", "Rounds formed.", labels=["job"])
        alive = GaugeMetricFamily("dlrover_hooks_members_alive", "Live members of the round.", labels=["job"])
        connected = GaugeMetricFamily(
            "dlrover_hooks_members_connected",
            "Live members with an open connection: the end of such a process is detected at once.",
            labels=["job"],
        )
        attempt = GaugeMetricFamily("dlrover_hooks_attempt", "Number of the attempt that runs.", labels=["job"])
        votes = CounterMetricFamily("dlrover_hooks_votes", "Votes counted for generations.", labels=["job"])
        commits = CounterMetricFamily("dlrover_hooks_commits", "Generations committed to storage.", labels=["job"])
        failures = CounterMetricFamily("dlrover_hooks_persist_failures", "Generations given up.", labels=["job"])
        everybody = self._state.jobs.items()
        kept = GaugeMetricFamily("dlrover_hooks_jobs", "Jobs this master keeps, by state.", labels=["state"])
        finished = sum(job.finished for _, job in everybody)
        kept.add_metric(["finished"], finished)
        kept.add_metric(["unfinished"], len(everybody) - finished)
        unfinished = ((name, job) for name, job in everybody if not job.finished)
        for name, job in heapq.nlargest(SERIES, unfinished, key=lambda item: item[1].changed_at):
            current = job.rounds.round
            live = current.live if current else 0
            rounds.add_metric([name], job.rounds.number)
            alive.add_metric([name], live)
            members = current.members.values() if current else ()
            connected.add_metric([name], sum(self._is_connected(name, one) for one in members))
            attempt.add_metric([name], job.attempt)
            votes.add_metric([name], job.saves.votes)
            commits.add_metric([name], job.saves.commits)
            failures.add_metric([name], job.saves.failures)
        yield from (kept, rounds, alive, connected, attempt, votes, commits, failures)

    def _is_connected(self, job: str, member: Member) -> bool:
        lease = self._nodes.pulses.get((job, member.incarnation))
        return member.live and lease is not None and lease.ears > 0


class _Roles(Collector):
    """Workers and budgets of unfinished jobs of several roles."""

    def __init__(self, state: Master) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "dlrover_hooks_role_workers", "Workers of a role, by state.", labels=["job", "role", "state"]
        )
        lives = CounterMetricFamily(
            "dlrover_hooks_role_lives", "Sum of the lives of the workers of a role.", labels=["job", "role"]
        )
        budget = ["job", "budget", "of"]
        used = GaugeMetricFamily(
            "dlrover_hooks_budget_used", "Failures that a budget counts within its window.", labels=budget
        )
        limit = GaugeMetricFamily("dlrover_hooks_budget_limit", "Limit of a budget; -1: none.", labels=budget)
        running = (
            (name, job.roles) for name, job in sorted(self._state.jobs.items()) if job.roles and not job.roles.over
        )
        for name, roles in islice(running, SERIES):
            for role, of in roles.workers.items():
                lives.add_metric([name, role], sum(one.life for one in of))
                for state in WorkerState:
                    workers.add_metric([name, role, state.value], sum(one.state is state for one in of))
            for one in restart_counts(roles, self._state.now):
                used.add_metric([name, one.kind, one.of], one.used)
                limit.add_metric([name, one.kind, one.of], one.limit)
        yield from (workers, lives, used, limit)


class _Uses(Collector):
    """What nodes and ranks use: a gauge for each number of the messages, with the names of the fields."""

    def __init__(self, state: Master, nodes: Nodes) -> None:
        self._state, self._nodes = state, nodes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for job, use in islice(self._of_nodes(), USES):
            for part in ("cpu", "memory", "disk", "network"):
                _gauge(families, f"node_{part}", getattr(use, part), job=job, node=use.node)
        for job, use in islice(self._of_ranks(), USES):
            own, rank = use.vitals, str(use.rank)
            _gauge(families, "rank_process", own, job=job, rank=rank)
            _gauge(families, "rank_accelerator", own.accelerator if own is not None else None, job=job, rank=rank)
            _gauge(families, "rank_tree", use.processes, job=job, rank=rank)
        yield from families.values()

    def _unfinished(self) -> Iterator[tuple[str, Job]]:
        return ((name, job) for name, job in sorted(self._state.jobs.items()) if not job.finished)

    def _of_nodes(self) -> Iterator[tuple[str, NodeUse]]:
        for name, job in self._unfinished():
            yield from ((name, use) for use in node_vitals.node_uses(self._nodes, job, 0.0))

    def _of_ranks(self) -> Iterator[tuple[str, RankUse]]:
        for name, job in self._unfinished():
            yield from ((name, use) for use in node_vitals.rank_uses(self._nodes, job))


def _gauge(families: dict[str, GaugeMetricFamily], prefix: str, use: msgspec.Struct | None, **labels: str) -> None:
    """A sample in the family of each number in `use`; the unit is in its name."""
    for field in msgspec.structs.fields(use) if use is not None else ():
        value: Any = getattr(use, field.name)
        if isinstance(value, int | float):
            name = f"dlrover_hooks_{prefix}_{field.name}"
            if name not in families:
                text = f"See {type(use).__name__}.{field.name} in /openapi.json."
                families[name] = GaugeMetricFamily(name, text, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
