"""Cluster Mode of a master: plans of its jobs come from the Brain, or from their own statistics while it is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlrover_hooks.errors import HooksError
from dlrover_hooks.master.brain.client.brain_optimizer import BrainOptimizer
from dlrover_hooks.master.brain.client.stats_reporter import StatsReporter
from dlrover_hooks.master.brain.messages import RegisterJob
from dlrover_hooks.master.scaling.job_resource_optimizer import Situation
from dlrover_hooks.master.scaling.local_optimizer import LocalOptimizer
from dlrover_hooks.master.scaling.optimizer import NO_CONFIG, OptimizeStage, ResourceOptimizer
from dlrover_hooks.protocol import JobSample, Node, ResourcePlan

log = logging.getLogger("dlrover_hooks.master")


class _BrainJob:
    """One job: its optimizer, its reporter, and whether the Brain answered last."""

    def __init__(self, url: str, token: str | None, found: Situation) -> None:
        about = RegisterJob(found.job, found.limits, user=found.user, script_hash=found.script_hash, ps=found.ps)
        self.name, self.away = found.job, False
        self.optimizer = BrainOptimizer(url, token, about)
        self.reporter = StatsReporter(url, token, about)
        self.reporter.start()


class BrainOrLocalOptimizer(ResourceOptimizer):
    """The Brain's plans; while it does not answer, those of the `LocalOptimizer`. Both changes are logged once."""

    def __init__(self, brain: _BrainJob, local: LocalOptimizer) -> None:
        self._brain, self._local = brain, local

    def generate_opt_plan(self, stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """The plan for a stage."""
        return self._ask(lambda one: one.generate_opt_plan(stage, config))

    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Node], stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG
    ) -> ResourcePlan:
        """The plan for nodes that were killed because their memory was used up."""
        return self._ask(lambda one: one.generate_oom_recovery_plan(oom_nodes, stage, config))

    def generate_resource_plan_with_optimizer(self, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """The plan of the fitted model alone."""
        return self._ask(lambda one: one.generate_resource_plan_with_optimizer(config))

    def predict(self, plan: ResourcePlan) -> float | None:
        """Steps per second with `plan`, by what made it."""
        return self._local.predict(plan) if self._brain.away else self._brain.optimizer.answer.predicted

    def explain(self, plan: ResourcePlan) -> str:
        """The Brain's reason. Empty if the plan is not the Brain's."""
        answer = self._brain.optimizer.answer
        return "" if self._brain.away else f"the Brain ({answer.algorithm}): {answer.reason}"

    def _ask(self, ask: Callable[[ResourceOptimizer], ResourcePlan]) -> ResourcePlan:
        brain = self._brain
        try:
            plan = ask(brain.optimizer)
        except HooksError as error:
            if not brain.away:
                log.warning("job %s: %s The master plans from the job's own statistics meanwhile", brain.name, error)
            brain.away = True
            return ask(self._local)
        if brain.away:
            log.warning("job %s: the Brain answers again, and makes the plans", brain.name)
        brain.away = False
        return plan


class BrainJobs:
    """The jobs of one master that the Brain at `url` plans. `optimizer` is called by the planning thread, the others
    by the loop.

    Raises `UsageError` for a wrong address.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url, self._token = url, token
        self._jobs: dict[str, _BrainJob] = {}

    def optimizer(self, found: Situation) -> ResourceOptimizer:
        """The optimizer of a job."""
        local = LocalOptimizer(found.limits, ps=found.ps, statistics=found.statistics, has=found.has)
        if found.job not in self._jobs:
            self._jobs[found.job] = _BrainJob(self._url, self._token, found)
        return BrainOrLocalOptimizer(self._jobs[found.job], local)

    def report(self, job: str, sample: JobSample) -> None:
        """Have a sample of a job sent; never waits."""
        if (brain := self._jobs.get(job)) is not None:
            brain.reporter.report(sample)

    def end(self, job: str, *, succeeded: bool) -> None:
        """A job is over: the Brain is told, and keeps its statistics. Waits for the Brain; call it on a thread."""
        brain = self._jobs.pop(job, None)
        if brain is None:
            return
        brain.reporter.stop()
        try:
            brain.optimizer.end_job(succeeded=succeeded)
        except HooksError as error:
            log.warning("job %s: the Brain was not told of its end: %s", job, error)
        brain.optimizer.close()

    def close(self) -> None:
        """Stop all reporters. Waits up to some seconds for the Brain."""
        for brain in list(self._jobs.values()):
            brain.reporter.stop()
            brain.optimizer.close()
        self._jobs.clear()
