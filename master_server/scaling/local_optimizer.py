"""Plans for one job from what was measured of this job alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.core.job_scaling import job_statistics
from dlrover_hooks.master.core.job_scaling.job_statistics import Configuration, JobStatistics, configuration
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.master.scaling.optimizer import NO_CONFIG, ResourceOptimizer
from dlrover_hooks.master.scaling.speed_models import (
    PS_TERMS,
    StepTime,
    fit_all_reduce,
    fit_ps_speed,
    smallest_that_pays,
)
from dlrover_hooks.protocol import (
    JobSample,
    Node,
    NodeGroupResource,
    NodeResource,
    NodeType,
    OptimizeStage,
    ResourceLimits,
    ResourcePlan,
)

PAYS = 0.95
"""The smallest job is planned that has this share of the best predicted speed."""
GROWTH = 2
"""A plan has at most so many times the nodes of a type that were ever measured: a model is not trusted further."""
WORTH = 0.03
"""A plan that is predicted to gain less than this share of the speed, and to need no fewer nodes, is not made."""
ALL_REDUCE_POINTS = 3
"""Numbers of workers that are measured before the model is fitted."""


class LocalOptimizer(ResourceOptimizer):
    """For Single-Job Mode, without a service: it knows the `statistics` of its job, and nothing of the cluster.

    `ps`: the job has parameter servers. Otherwise it is an all-reduce job with a fixed `global_batch` (samples) and
    `workers_per_host`. `has`: its nodes, as a plan, where no sample with them is there yet. Not thread-safe: one thread
    calls it.
    """

    def __init__(
        self,
        limits: ResourceLimits,
        *,
        ps: bool = False,
        global_batch: int = 1,
        workers_per_host: int = 1,
        statistics: JobStatistics | None = None,
        has: ResourcePlan | None = None,
    ) -> None:
        if global_batch < 1 or workers_per_host < 1:
            raise UsageError(
                f"optimizer: global_batch {global_batch}, workers_per_host {workers_per_host}", hint="give at least 1"
            )
        self.limits, self.ps = limits, ps
        self.global_batch, self.workers_per_host = global_batch, workers_per_host
        self.statistics, self._has = statistics or JobStatistics(), has or ResourcePlan()

    def observe(self, sample: JobSample) -> None:
        """Take in what was measured over one window; see `job_statistics.observed`. Raises `UsageError`."""
        self.statistics = job_statistics.observed(self.statistics, sample, ps=self.ps)

    def generate_opt_plan(self, stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """By the rules until enough was measured, then by the model. Empty: the job stays as it is."""
        if stage is OptimizeStage.CREATE:
            return rules.first_plan(self.limits, self.ps)
        if not self._recent:
            return ResourcePlan()
        if stage is OptimizeStage.WORKER_INITIAL:
            workers = NodeGroupResource(self._current[-1], rules.worker_resource(self._recent))
            return ResourcePlan({rules.WORKER: workers})
        if stage is OptimizeStage.PS_INITIAL:
            return ResourcePlan({rules.PS: rules.ps_group(self._recent, self.limits)} if self.ps else {})
        if self.ps and (hot := rules.hot_servers(self._recent, self.limits)):
            return ResourcePlan(node_resources=hot)
        return self.generate_resource_plan_with_optimizer(config) if self._determined else self._explore()

    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Node], stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG
    ) -> ResourcePlan:
        """More memory, or more parameter servers. Empty: neither may be given."""
        sample = self._recent[-1] if self._recent else None
        ps, workers = (0, *self._current)[-2:] if self._recent else self._counts()
        return rules.after_out_of_memory(oom_nodes, sample, self.limits, ps, workers)

    def generate_resource_plan_with_optimizer(self, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """By the model alone; empty while it is not determined. Raises `MissingExtra` without scipy."""
        if not self._recent or not self._determined:
            return ResourcePlan()
        choices = self._choices()
        if not len(choices):
            return ResourcePlan()
        speed, current = self._fitted(), self._current
        best = smallest_that_pays(choices, speed, PAYS)
        gain = float(speed(*best)) / float(speed(*current)) - 1
        fits = self._fits(np.array([current]))[0]
        if fits and gain < WORTH and sum(best) >= sum(current):
            return ResourcePlan()
        return self._plan(best)

    def predict(self, plan: ResourcePlan) -> float | None:
        """Steps per second with the nodes of `plan`, by the model. None: it is not determined, or sizes change."""
        if not self._recent or not self._determined or plan.node_resources:
            return None
        names = [rules.PS, rules.WORKER] if self.ps else [rules.WORKER]
        groups = [plan.node_group_resources.get(name) for name in names]
        counts = [now if group is None else group.count for group, now in zip(groups, self._current, strict=True)]
        return float(self._fitted()(*counts))

    @property
    def predicted(self) -> float | None:
        """Steps per second of the configuration that was measured last, by the model. None: it is not determined."""
        return float(self._fitted()(*self._current)) if self._recent and self._determined else None

    def speeds(self) -> dict[Configuration, float]:
        """Steps per second of each configuration that a plan may have now, by the model; measured ones without it."""
        if not self._recent or not self._determined:
            return {one.configuration: one.mean for one in self.statistics.measured}
        choices = self._choices()
        if not len(choices):
            return {}
        found = zip(choices, self._fitted()(*choices.T), strict=True)
        return {tuple(int(number) for number in choice): float(speed) for choice, speed in found}

    @property
    def _recent(self) -> tuple[JobSample, ...]:
        return self.statistics.recent

    @property
    def _current(self) -> Configuration:
        return configuration(self._recent[-1], ps=self.ps)

    def _counts(self) -> Configuration:
        """Servers and workers of the job, without a sample."""
        groups = self._has.node_group_resources
        counts = [groups[name].count if name in groups else 0 for name in (rules.PS, rules.WORKER)]
        return counts[0] or int(self.ps), counts[1] or self.limits.min_workers

    @property
    def _determined(self) -> bool:
        return len(self.statistics.measured) >= (PS_TERMS if self.ps else ALL_REDUCE_POINTS)

    def _fitted(self) -> Any:
        """The speed as a function of a configuration."""
        points = [(*one.configuration, one.mean) for one in self.statistics.measured]
        if self.ps:
            return fit_ps_speed(points).speed
        model = fit_all_reduce([self._step(workers, 1 / speed) for workers, speed in points])
        hosts = self.workers_per_host
        return lambda workers: 1 / model.seconds(workers, -(-workers // hosts), self.global_batch / workers)

    def _step(self, workers: int, seconds: float) -> StepTime:
        return StepTime(workers, math.ceil(workers / self.workers_per_host), self.global_batch / workers, seconds)

    def _choices(self) -> Any:
        """Every configuration within the limits and `GROWTH`: an array with a row for each."""
        points = [one.configuration for one in self.statistics.measured]
        measured = [max(numbers) * GROWTH for numbers in zip(*points, strict=True)]
        counts = [np.arange(self.limits.min_workers, min(self.limits.max_workers, measured[-1]) + 1)]
        if self.ps:
            counts.insert(0, np.arange(self.limits.min_ps, min(self.limits.max_ps, measured[0]) + 1))
        choices = np.stack(np.meshgrid(*counts, indexing="ij"), axis=-1).reshape(-1, len(counts))
        return choices[self._fits(choices)]

    def _explore(self) -> ResourcePlan:
        """The next configuration to be measured: workers doubled, then servers, in turn.

        With exhausted servers only these; where nothing else fits, one worker less.
        """
        current, known = self._current, {one.configuration for one in self.statistics.measured}
        larger = [(*current[:-1], min(2 * current[-1], self.limits.max_workers))]
        if self.ps:
            ps, workers = current
            more_servers = (min(2 * ps, self.limits.max_ps), workers)
            exhausted = max(node.cpu_share for node in self._recent[-1].of(NodeType.PS)) > rules.EXHAUSTED
            larger = [more_servers] if exhausted else sorted([*larger, more_servers], reverse=len(known) % 2 == 0)
        smaller = [(*current[:-1], current[-1] - 1)] if current[-1] > self.limits.min_workers else []
        for choice in [*larger, *smaller]:
            if choice not in known and self._fits(np.array([choice]))[0]:
                return self._plan(choice)
        return ResourcePlan()

    def _fits(self, choices: Any) -> Any:
        """Of each row, whether the limits hold with nodes of the sizes that the job has now."""
        sizes = self._resources()
        cpu = choices @ np.array([size.cpu for size in sizes])
        memory = choices @ np.array([size.memory for size in sizes])
        return (cpu <= self.limits.cpu) & (memory <= self.limits.memory)

    def _resources(self) -> list[NodeResource]:
        """Of one node of each type, in the order of a configuration: the largest that runs."""
        kinds = [NodeType.PS, NodeType.WORKER] if self.ps else [NodeType.WORKER]
        return [self._recent[-1].largest(kind) for kind in kinds]

    def _plan(self, choice: Configuration) -> ResourcePlan:
        names = [rules.PS, rules.WORKER] if self.ps else [rules.WORKER]
        groups = zip(names, choice, self._resources(), self._current, strict=True)
        return ResourcePlan({name: NodeGroupResource(n, size) for name, n, size, now in groups if n != now})
