"""Plans for one job from what was measured of this job alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.scaling import rules
from dlrover_hooks.master.scaling.optimizer import NO_CONFIG, OptimizeStage, ResourceOptimizer
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
    ResourceLimits,
    ResourcePlan,
)

RECENT = 5
"""Samples that the rules use, and that each configuration keeps."""
CONFIGURATIONS = 64
"""Configurations whose speed is kept; the one that was measured longest ago is forgotten first."""
PAYS = 0.95
"""The smallest job is planned that has this share of the best predicted speed."""
GROWTH = 2
"""A plan has at most so many times the nodes of a type that were ever measured: a model is not trusted further."""
WORTH = 0.03
"""A plan that is predicted to gain less than this share of the speed, and to need no fewer nodes, is not made."""
ALL_REDUCE_POINTS = 3
"""Numbers of workers that are measured before the model is fitted."""
Configuration = tuple[int, ...]
"""(servers, workers) of a job with parameter servers, (workers,) of another one."""


class LocalOptimizer(ResourceOptimizer):
    """For Single-Job Mode, without a service: statistics are in memory, and nothing is known of the cluster.

    `ps`: the job has parameter servers. Otherwise it is an all-reduce job with a fixed `global_batch` (samples) and
    `workers_per_host`. Not thread-safe: one thread calls it.
    """

    def __init__(
        self, limits: ResourceLimits, *, ps: bool = False, global_batch: int = 1, workers_per_host: int = 1
    ) -> None:
        if global_batch < 1 or workers_per_host < 1:
            raise UsageError(
                f"optimizer: global_batch {global_batch}, workers_per_host {workers_per_host}", hint="give at least 1"
            )
        self.limits, self.ps = limits, ps
        self.global_batch, self.workers_per_host = global_batch, workers_per_host
        self._recent: deque[JobSample] = deque(maxlen=RECENT)
        self._speeds: dict[Configuration, deque[float]] = {}

    def observe(self, sample: JobSample) -> None:
        """Take in what was measured over one window. A sample without progress counts for the rules only.

        With nodes of other sizes than before, the speeds of all configurations are forgotten: they were those of other
        nodes. Raises `UsageError` for a sample without workers, or without servers in a job that has them.
        """
        current = _configuration(sample, self.ps)
        if not all(current):
            kinds = "parameter servers and workers" if self.ps else "workers"
            raise UsageError(f"sample of a job: it has {current} nodes", hint=f"a sample needs {kinds}")
        if self._recent and _sizes(self._recent[-1]) != _sizes(sample):
            self._recent.clear()
            self._speeds.clear()
        if self._recent and self._current != current:
            self._recent.clear()  # the use of other nodes says nothing about these
        self._recent.append(sample)
        if sample.speed > 0:
            self._speeds[current] = self._speeds.pop(current, deque(maxlen=RECENT))
            self._speeds[current].append(sample.speed)
            if len(self._speeds) > CONFIGURATIONS:
                del self._speeds[next(iter(self._speeds))]

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
        workers = self._current[-1] if self._recent else self.limits.min_workers
        return rules.after_out_of_memory(oom_nodes, sample, self.limits, workers)

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

    @property
    def predicted(self) -> float | None:
        """Steps per second of the configuration that was measured last, by the model. None: it is not determined."""
        return float(self._fitted()(*self._current)) if self._recent and self._determined else None

    def speeds(self) -> dict[Configuration, float]:
        """Steps per second of each configuration that a plan may have now, by the model; measured ones without it."""
        if not self._recent or not self._determined:
            return {where: sum(speeds) / len(speeds) for where, speeds in self._speeds.items()}
        choices = self._choices()
        if not len(choices):
            return {}
        found = zip(choices, self._fitted()(*choices.T), strict=True)
        return {tuple(int(number) for number in choice): float(speed) for choice, speed in found}

    @property
    def _current(self) -> Configuration:
        return _configuration(self._recent[-1], self.ps)

    @property
    def _determined(self) -> bool:
        return len(self._speeds) >= (PS_TERMS if self.ps else ALL_REDUCE_POINTS)

    def _fitted(self) -> Any:
        """The speed as a function of a configuration."""
        points = [(*where, sum(speeds) / len(speeds)) for where, speeds in self._speeds.items()]
        if self.ps:
            return fit_ps_speed(points).speed
        model = fit_all_reduce([self._step(workers, 1 / speed) for workers, speed in points])
        hosts = self.workers_per_host
        return lambda workers: 1 / model.seconds(workers, -(-workers // hosts), self.global_batch / workers)

    def _step(self, workers: int, seconds: float) -> StepTime:
        return StepTime(workers, math.ceil(workers / self.workers_per_host), self.global_batch / workers, seconds)

    def _choices(self) -> Any:
        """Every configuration within the limits and `GROWTH`: an array with a row for each."""
        measured = [max(numbers) * GROWTH for numbers in zip(*self._speeds, strict=True)]
        counts = [np.arange(self.limits.min_workers, min(self.limits.max_workers, measured[-1]) + 1)]
        if self.ps:
            counts.insert(0, np.arange(1, min(self.limits.max_ps, measured[0]) + 1))
        choices = np.stack(np.meshgrid(*counts, indexing="ij"), axis=-1).reshape(-1, len(counts))
        return choices[self._fits(choices)]

    def _explore(self) -> ResourcePlan:
        """The next configuration to be measured: workers doubled, then servers, in turn.

        With exhausted servers only these; where nothing else fits, one worker less.
        """
        current, measured = self._current, len(self._speeds)
        larger = [(*current[:-1], min(2 * current[-1], self.limits.max_workers))]
        if self.ps:
            ps, workers = current
            more_servers = (min(2 * ps, self.limits.max_ps), workers)
            exhausted = max(node.cpu_share for node in self._recent[-1].of(NodeType.PS)) > rules.EXHAUSTED
            larger = [more_servers] if exhausted else sorted([*larger, more_servers], reverse=measured % 2 == 0)
        smaller = [(*current[:-1], current[-1] - 1)] if current[-1] > self.limits.min_workers else []
        for choice in [*larger, *smaller]:
            if choice not in self._speeds and self._fits(np.array([choice]))[0]:
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


def _sizes(sample: JobSample) -> set[tuple[NodeType, float, int]]:
    """What the nodes compute with. Memory is left out: more of it does not make a node faster."""
    return {(node.type, node.config_resource.cpu, node.config_resource.gpu_num) for node in sample.nodes}


def _configuration(sample: JobSample, ps: bool) -> Configuration:
    workers = len(sample.of(NodeType.WORKER))
    return (len(sample.of(NodeType.PS)), workers) if ps else (workers,)
